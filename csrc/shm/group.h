// One rank's view of a group's shared memory: agreeing on a call, waiting, failing together.
//
// Protocol "arrive" (every collective begins with it; s = its sequence number, on every rank alike)
//   writer    each rank fills the header (and inbox, counts) of parity s % 2, then publishes
//   arrived = s reader    each rank waits for arrived >= s of all others, then compares all
//   headers: the same
//             comparison of the same values, so all ranks come to the same verdict and raise
//             together
//   reuse     parity s % 2 is overwritten by call s + 2, which a rank begins after it has seen
//             arrived >= s + 1 of all: and that a rank publishes after its last read of call s
//   progress  arrived = s is published before any wait of call s
// A refused call publishes its header and does not wait; the wait is owed by the rank's next call.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/fork.h"
#include "shm/bootstrap.h"
#include "shm/layout.h"

namespace pyparallel::shm {

class Group {
 public:
  // `hopeful`: as Segment::open has it.
  Group(const UniqueId& id, int rank, int size, std::string name, Deadline deadline,
        const std::function<void()>& hopeful);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  const Layout& layout() const { return layout_; }
  std::uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

  RankPage& page(int rank) const { return at<RankPage>(layout_.rank_page(rank)); }
  std::byte* inbox(int rank) const { return data_ + layout_.inbox(rank, parity()); }
  std::byte* staging(int rank) const { return data_ + layout_.staging(rank); }
  RingPage& ring(int from, int to) const { return at<RingPage>(layout_.ring(from, to)); }
  const CallHeader& header(int rank) const { return page(rank).calls[parity()]; }
  // What the rank's caller said of its call; empty: nothing.
  const char* note(int rank) const { return header(rank).noted() ? page(rank).note[parity()] : ""; }
  // Counts of an uneven call: [0, size) sent to each rank, [size, 2*size) received from each.
  std::uint64_t* counts(int rank) const {
    return &at<std::uint64_t>(layout_.counts(rank, parity()));
  }
  void reserve(std::size_t offset, std::size_t bytes) { segment_->reserve(offset, bytes); }

  // --- a call, in this order. Throws Closed, or the group's failure.
  // Takes the note that the caller left for this call (leave_note(this, text)).
  void begin(Op op, const Deadline& deadline);
  // The header to fill; its arrays are inbox() and counts(). Valid from begin() to arrive().
  CallHeader& mine() { return page(rank_).calls[parity()]; }
  // Announces the call and waits for all; throws Mismatch on every rank where they differ.
  void arrive(const Deadline& deadline);
  // Instead of begin() and arrive(): a call that this rank cannot make. Waits only for what an
  // earlier refusal owes.
  void refuse(std::string_view op, std::string_view why, const Deadline& deadline);

  // Waits for a flag of `peer`; on timeout or loss breaks the group and throws. `what` names the
  // call.
  template <typename What>
  void wait(Flag& flag, std::uint64_t target, int peer, const Deadline& deadline,
            const What& what) {
    if (flag.load() >= target) return;
    if (spin_->spin([&] { return flag.load() >= target; })) return;
    sleep_until(flag, target, peer, deadline, what());
  }
  // The same within the current collective.
  void wait(Flag& flag, std::uint64_t target, int peer, const Deadline& deadline) {
    wait(flag, target, peer, deadline, [this] { return describe(); });
  }

  // Whether the ranks have fewer cores than there are ranks.
  bool crowded() const { return crowded_; }
  // Before sleeping for `peer`: leaves its core, if both have come to run on one while others are
  // idle.
  void separate_from(int peer);

  // --- life
  bool forked() const { return fork_generation() != fork_generation_; }
  void throw_if_unusable() const {
    if (fork_generation() != fork_generation_ || closed_.load(std::memory_order_relaxed) ||
        group_page().failed.load(std::memory_order_relaxed) != 0)
      throw_unusable();
  }
  // Records the first failure of the group, wakes everybody. Later ones are ignored.
  void fail(Status status, std::string_view text) noexcept;
  void close() noexcept;
  std::string failure() const;
  int pid_of(int rank) const { return watches_[rank]->visible_pid(); }
  bool alive(int peer) const { return watches_[peer]->alive(); }
  // Throws PeerLost (after breaking the group) when `peer` has died or left; `what` names the call.
  void check_alive(int peer, const std::string& what);
  // "rank 2 (pid 17) absent after 3 s (process stopped, last call #117 all_reduce)"
  std::string absence(int peer, const Deadline& deadline) const;
  // "all_reduce #118, group tp (ranks 0-3)"
  std::string describe() const;

 private:
  template <typename T>
  T& at(std::size_t offset) const {
    return *reinterpret_cast<T*>(data_ + offset);
  }
  GroupPage& group_page() const { return at<GroupPage>(0); }
  unsigned parity() const { return static_cast<unsigned>(sequence() & 1); }
  void sleep_until(Flag& flag, std::uint64_t target, int peer, const Deadline& deadline,
                   const std::string& what);
  void check_agreement();
  [[noreturn]] void throw_unusable() const;
  void wake_everybody() noexcept;

  const int rank_;
  const int size_;
  const std::string name_;
  const Layout layout_;
  const std::uint32_t fork_generation_;
  std::shared_ptr<Segment> segment_;
  std::byte* data_;
  std::vector<std::unique_ptr<ProcessWatch>> watches_;
  bool crowded_ = false;
  std::unique_ptr<SpinBudget> spin_;
  std::atomic<std::int64_t> separated_{0};  // when last, steady clock
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<bool> closed_{false};
  bool owed_ = false;       // the wait of a refused call
  std::uint64_t note_ = 0;  // digest of the current call's note
};

}  // namespace pyparallel::shm
