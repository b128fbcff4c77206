// send and recv: one ring of bytes per ordered pair of ranks.
//
// Protocol "ring" (counters of bytes, never cleared; a message is a 64-byte header and its data,
// padded to 64 bytes)
//   sender    copies bytes into the free part, publishes `written`, rings the receiver's bell
//   receiver  copies bytes out, publishes `read`, rings the sender's bell
//   sleep     whoever can do nothing sleeps on its own bell: announces itself, looks at all its
//   rings
//             once more, then sleeps; a bell is rung only when somebody sleeps on it
//   progress  a rank whose sends do not move takes in what is sent to it, into memory of its own,
//   so
//             that ranks that all send first cannot block each other
// Matching: a receive takes the oldest message of its (source, tag). Messages that nobody asked for
// yet stay in the ring (that holds the sender back), unless one behind them is asked for.
// A message that must be taken in and finds no memory breaks the group: it could neither stay in
// the ring, where what is behind it is needed, nor be dropped, as it may be asked for later.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/thread.h"
#include "shm/communicator.h"
#include "shm/group.h"
#include "shm/peer_writer.h"

namespace pyparallel::shm {

class PointToPoint : public std::enable_shared_from_this<PointToPoint> {
 public:
  explicit PointToPoint(std::shared_ptr<Group> group);
  ~PointToPoint();

  class Transfer;
  // The caller keeps the array alive until the transfer is done or has thrown.
  std::shared_ptr<Transfer> start_send(const void* data, std::size_t count, DType, int to,
                                       std::int64_t tag);
  std::shared_ptr<Transfer> start_recv(void* data, std::size_t count, DType, int from,
                                       std::int64_t tag);
  // Returns when done; a timeout, a lost peer or an abort breaks the group and ends all transfers.
  void wait(Transfer& transfer, const Deadline& deadline);
  // Lets a thread of this engine move what is started while nobody waits.
  void progress_in_background();
  // See Work::cancel.
  bool cancel(Transfer& transfer);
  // Ends all transfers with Closed. Never waits.
  void stop() noexcept;

 private:
  struct MessageHeader;
  // Per source: what is arriving, and what has arrived unasked.
  struct Incoming {
    // A message that came before anybody asked for it.
    struct Unexpected {
      std::int64_t tag;
      std::size_t count;
      DType dtype;
      std::unique_ptr<std::byte[]> data;
      bool complete = false;
      std::shared_ptr<Transfer> claimed;  // asked for while still arriving
    };

    std::uint64_t read = 0;  // our copy of the ring's counter
    bool arriving = false;
    std::size_t bytes = 0;
    std::size_t moved = 0;
    std::byte* target = nullptr;        // null: the data is dropped
    std::shared_ptr<Transfer> receive;  // or the last of `unexpected`, where null
    std::deque<Unexpected> unexpected;
  };

  bool progress();  // true when anything moved; with mutex_ held
  bool push(int to);
  bool pull(int from, bool drain);
  bool take_header(int from, bool drain);
  void finish(Transfer& transfer);
  void finish_unexpected(int from);
  bool match_unexpected(Transfer& transfer);
  void hand_over(const Incoming::Unexpected& message, Transfer& transfer);
  // Ends all transfers. What is none of our own errors breaks the group; those come of that.
  void end_all(const Cause& cause) noexcept;
  // Runs `body`; what it throws ends all transfers and is thrown as one of our own errors. With
  // mutex_ held, as end_all().
  template <typename Body>
  void guarded(const Body& body);
  void reserve_rings(int to);
  class Gone;
  void look_after(const Transfer& transfer, const Deadline* deadline, Gone& gone);
  void background();
  std::string describe(const Transfer& transfer) const;

  std::shared_ptr<Group> group_;
  const int rank_;
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  SpinBudget spin_;
  PeerWriter to_peers_;
  std::vector<std::deque<std::shared_ptr<Transfer>>> sends_;  // by receiver, in order
  std::list<std::shared_ptr<Transfer>> receives_;             // in order of posting
  std::vector<std::unique_ptr<Incoming>> incoming_;           // by source
  std::vector<bool> reserved_to_;
  bool reserved_incoming_ = false;
  std::size_t pending_ = 0;
  std::atomic<int> waiters_{0};
  bool stopped_ = false;
  bool background_running_ = false;
  bool background_idle_ = false;
};

template <typename Body>
void PointToPoint::guarded(const Body& body) {
  try {
    body();
  } catch (...) {
    const Cause cause = cause_of(std::current_exception());
    end_all(cause);
    throw_status(cause.status, cause.text);
  }
}

// One send or receive. Fields are the engine's, under its mutex; `done` may be read by anybody.
class PointToPoint::Transfer : public Work {
 public:
  bool done() const override { return done_.load(std::memory_order_acquire); }
  void wait(Deadline deadline) override { engine_->wait(*this, deadline); }
  int source() const override { return source_; }
  bool cancel() override { return engine_->cancel(*this); }

 private:
  friend class PointToPoint;
  std::shared_ptr<PointToPoint> engine_;
  bool is_send_ = false;
  std::byte* data_ = nullptr;
  std::size_t count_ = 0;
  std::size_t bytes_ = 0;
  DType dtype_ = DType::u8;
  int peer_ = -1;  // any_source is possible for a receive
  std::int64_t tag_ = 0;
  std::size_t moved_ = 0;  // bytes of data
  bool header_sent_ = false;
  std::atomic<int> source_{-1};  // of a receive that has its message
  Status status_ = Status::ok;   // how it ended, when done
  std::string error_;
  std::atomic<bool> done_{false};
};

}  // namespace pyparallel::shm
