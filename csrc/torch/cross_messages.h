// Send and receive between ranks of different hosts, carried by torch's gloo.
//
// Protocol "announced message": the sender sends a fixed header under the caller's tag and the data
// under a tag of its own that the header names. The receiver checks the header before it takes the
// data, so a wrong size or type is an error on its side, and the connection stays usable.
//
// A receive from any source waits for headers of all ranks (gloo's own any-source receive) and for
// a message from this host at once; whichever begins first takes the other back. gloo cannot take
// back a receive, and its next header may be of a message that another receive names: so from the
// first such receive of a tag on, all receives of that tag share an Inbox, in which headers wait
// for receives and receives for headers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
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
  ~CrossMessages();

  // Started at once, ended on a thread of their own. The caller keeps the array alive until then.
  std::shared_ptr<shm::Work> send(const void* data, std::size_t count, DType dtype, int destination,
                                  std::int64_t tag, std::chrono::milliseconds timeout);
  std::shared_ptr<shm::Work> receive(void* data, std::size_t count, DType dtype, int source,
                                     std::int64_t tag, std::chrono::milliseconds timeout);
  // From any rank. `local` is the same receive among the ranks of this host, which may come first;
  // `ranks` are those ranks, as the group counts them.
  std::shared_ptr<shm::Work> receive_any(void* data, std::size_t count, DType dtype,
                                         std::int64_t tag, std::chrono::milliseconds timeout,
                                         std::shared_ptr<shm::Work> local, std::vector<int> ranks);
  // Throws InvalidArgument where gloo cannot carry the tag.
  static void check_tag(const std::string& what, std::int64_t tag);
  void abort() noexcept;  // ends all that is under way

 private:
  using GlooWork = c10::intrusive_ptr<c10d::Work>;
  struct Header;
  struct Receipt;
  struct Announced;
  struct Inbox;

  std::string describe(const char* verb, int peer, std::int64_t tag) const;
  c10::intrusive_ptr<c10d::Backend> gloo() const;
  void wait(const GlooWork& work, Deadline deadline, const std::string& what);
  void take(Receipt& receipt, const Header& header, Deadline deadline);
  // --- inboxes (cross_inbox.cpp)
  bool has_inbox(std::int64_t tag) const;
  void put_in_inbox(const std::shared_ptr<Receipt>& receipt, std::int64_t tag);
  // Waits for the receipt's header, or its message from this host; gives the source.
  int take_from_inbox(const std::shared_ptr<Receipt>& receipt, std::int64_t tag, Deadline deadline);
  void listen(std::int64_t tag);
  void match(Inbox& inbox);
  // Runs `end`, which gives the source, on a thread; what it throws ends the work, and the group
  // unless it is a Mismatch.
  void end_on_thread(const std::shared_ptr<CallWork>& work, std::function<int()> end);

  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> gloo_;  // released by abort()
  std::list<GlooWork> waiting_;
  std::map<std::int64_t, Inbox> inboxes_;  // by tag
  std::condition_variable matched_;
  const std::string group_;
  const std::function<void(const Error&)> failed_;
  std::atomic<std::uint32_t> sent_{0};
};

}  // namespace pyparallel::dist
