// Send and receive between ranks of different hosts, carried by torch's gloo.
//
// Protocol "announced message": the sender sends a fixed header under the caller's tag and the data
// under a tag of its own that the header names. The receiver checks the header before it takes the
// data, so a wrong size or type is an error on its side, and the connection stays usable.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "base/error.h"
#include "shm/communicator.h"
#include "torch/worker.h"

namespace pyparallel::dist {

class CrossMessages : public std::enable_shared_from_this<CrossMessages> {
 public:
  // Tags of callers are below this; gloo's are 31 bits, and the upper half names data.
  static constexpr std::int64_t tags = std::int64_t{1} << 30;

  // `gloo` has all ranks of the group. `failed` hears what broke a connection.
  CrossMessages(c10::intrusive_ptr<c10d::Backend> gloo, std::string group,
                std::function<void(const Error&)> failed);

  // Started at once, ended on a thread of their own. The caller keeps the array alive until then.
  std::shared_ptr<shm::Work> send(const void* data, std::size_t count, DType dtype, int destination,
                                  std::int64_t tag, std::chrono::milliseconds timeout);
  std::shared_ptr<shm::Work> receive(void* data, std::size_t count, DType dtype, int source,
                                     std::int64_t tag, std::chrono::milliseconds timeout);
  void abort() noexcept;  // ends all that is under way

 private:
  using GlooWork = c10::intrusive_ptr<c10d::Work>;
  struct Header;
  struct Receipt;

  std::string describe(const char* verb, int peer, std::int64_t tag) const;
  void check_tag(const char* verb, int peer, std::int64_t tag) const;
  c10::intrusive_ptr<c10d::Backend> gloo() const;
  void wait(const GlooWork& work, Deadline deadline, const std::string& what);
  void take(Receipt& receipt, Deadline deadline);
  // Runs `end` on a thread; what it throws ends the work, and the group unless it is a Mismatch.
  void end_on_thread(const std::shared_ptr<CallWork>& work, int source, std::function<void()> end);

  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> gloo_;  // released by abort()
  std::list<GlooWork> waiting_;
  const std::string group_;
  const std::function<void(const Error&)> failed_;
  std::atomic<std::uint32_t> sent_{0};
};

}  // namespace pyparallel::dist
