// What CrossMessages keeps of a message: its header on the wire, and the receive that wants it.
#pragma once

#include <optional>

#include "torch/cross_messages.h"

namespace pyparallel::dist {

struct CrossMessages::Header {
  static constexpr std::uint32_t expected_magic = 0x31535050;  // "PPS1"
  std::uint32_t magic = expected_magic;
  std::int32_t data_tag = 0;
  std::uint64_t count = 0;
  std::int64_t tag = 0;
  DType dtype = DType::u8;
  std::uint8_t reserved[7] = {};
};

struct CrossMessages::Announced {
  Header header;
  int source = -1;
};

struct CrossMessages::Receipt {
  void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::u8;
  int source = shm::Communicator::any_source;
  std::string what;
  // --- in an inbox, under its mutex
  std::shared_ptr<shm::Work> local;    // of a receive from any source
  bool from_this_host = false;         // local has its message, and headers are others'
  std::optional<Announced> announced;  // the header that is this receive's
};

// Of one tag.
struct CrossMessages::Inbox {
  std::list<std::shared_ptr<Receipt>> waiting;  // receives without a header, in order of posting
  std::deque<Announced> headers;                // that no receive wants yet, in order of arrival
  bool listening = false;                       // a thread waits for the next header
};

}  // namespace pyparallel::dist
