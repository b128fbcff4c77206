#include "shm/group.h"

#include <cstring>
#include <thread>

#include "base/interrupt.h"

namespace pyparallel::shm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLookAround(10);  // how often a sleeper looks for failures and lost peers

}  // namespace

Group::Group(const UniqueId& id, int rank, int size, std::string name, Deadline deadline,
             const std::function<void()>& hopeful)
    : rank_(rank),
      size_(size),
      name_(std::move(name)),
      layout_(size),
      fork_generation_(fork_generation()),
      segment_(Segment::open(id, rank, size, layout_.bytes(), layout_.reserved_bytes(), name_,
                             deadline, hopeful)),
      data_(segment_->data()) {
  page(rank).process = ProcessIdentity::of_this_process();
  page(rank).core.store(sched_getcpu(), std::memory_order_relaxed);
  if (sched_getaffinity(0, sizeof(cpu_set_t), &page(rank).cores) != 0) CPU_ZERO(&page(rank).cores);
  page(rank).seat.publish(1);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  // All have joined; their pages follow within microseconds. Only then can they be watched.
  for (int r = 0; r < size; ++r) {
    while (page(r).seat.load() == 0) {
      if (deadline.expired())
        throw Timeout(str("join of ", group_text(name_, size), ": rank ", r,
                          " joined but did not take its seat within ", deadline.timeout_seconds(),
                          " s"));
      hopeful();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    watches_.push_back(std::make_unique<ProcessWatch>(page(r).process));
    CPU_OR(&cores, &cores, &page(r).cores);
  }
  crowded_ = CPU_COUNT(&cores) < size;
  spin_ = std::make_unique<SpinBudget>(crowded_);
}

std::string Group::describe() const {
  const CallHeader& call = page(rank_).calls[parity()];
  return str(name_of(call.op), " #", sequence(), ", ", group_text(name_, size_));
}

void Group::begin(Op op, const Deadline& deadline) {
  throw_if_unusable();
  const std::uint64_t sequence = sequence_.load(std::memory_order_relaxed) + 1;
  if (owed_) {
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      Flag& arrived = page(r).calls[parity()].arrived;
      sleep_until(arrived, sequence - 1, r, deadline, describe());
    }
    owed_ = false;
  }
  sequence_.store(sequence, std::memory_order_relaxed);
  CallHeader& call = mine();
  call.op = op;
  call.dtype = DType::u8;
  call.reduction = ReduceOp::sum;
  call.flags = 0;
  call.root = -1;
  call.symmetric_rank = 0;
  call.count = 0;
  call.digest = 0;
  call.symmetric_segment = 0;
  call.symmetric_offset = 0;
  call.factor = 1.0;
  const Note* note = take_note(this);
  note_ = note == nullptr || op == Op::refused ? 0 : note->digest;
  if (note_ == 0) return;
  call.flags = CallHeader::kNoted;
  std::memcpy(page(rank_).note[parity()], note->text, note->length + 1);
}

void Group::arrive(const Deadline& deadline) {
  const std::uint64_t sequence = this->sequence();
  page(rank_).core.store(sched_getcpu(), std::memory_order_relaxed);
  mine().digest ^= note_;
  mine().arrived.publish(sequence);
  for (int r = 0; r < size_; ++r)
    if (r != rank_) wait(page(r).calls[sequence & 1].arrived, sequence, r, deadline);
  check_agreement();
}

void Group::refuse(std::string_view op, std::string_view why, const Deadline& deadline) {
  const std::string text = str("rank ", rank_, " could not make its call ", op, ": ", why);
  begin(Op::refused, deadline);
  char* out = page(rank_).refusal[parity()];
  out[text.copy(out, sizeof RankPage::refusal[0] - 1)] = '\0';
  mine().arrived.publish(sequence());
  owed_ = true;
}

void Group::sleep_until(Flag& flag, std::uint64_t target, int peer, const Deadline& deadline,
                        const std::string& what) {
  // A call cannot end on any rank before all have arrived: while one is awaited there, any lost
  // process is a failure. Later, each rank watches those it waits for, and they fail for all.
  const bool arriving =
      &flag == &page(peer).calls[0].arrived || &flag == &page(peer).calls[1].arrived;
  separate_from(peer);
  Sleeper sleeper(flag);
  auto looked = Deadline::Clock::now();
  for (;;) {
    // Ordered after the announcement, or a writer that has not seen the sleeper could be missed.
    const std::uint64_t seen = flag.value.load(std::memory_order_seq_cst);
    if (seen >= target) return;
    throw_if_unusable();
    const auto left = deadline.remaining();
    if (left.count() == 0) {
      std::string text = str(what, ": ", absence(peer, deadline));
      const char* also = "; absent too: rank ";
      for (int r = 0; arriving && r < size_; ++r) {
        if (r == rank_ || r == peer || page(r).calls[target & 1].arrived.load() >= target) continue;
        text += str(also, r);
        also = ", ";
      }
      fail(Status::timeout, text);
      throw_unusable();
    }
    const bool undisturbed = flag.sleep(seen, std::min<Deadline::Duration>(left, kLookAround));
    if (flag.load() >= target) return;
    const auto now = Deadline::Clock::now();
    if (undisturbed && now - looked < kLookAround) continue;
    looked = now;
    if (interrupt_requested()) {
      fail(Status::aborted, str(what, ": rank ", rank_, " was interrupted by a signal"));
      throw Interrupted(what + ": interrupted");
    }
    for (int r = 0; r < size_; ++r) {
      if (r == rank_ || (r != peer && !arriving)) continue;
      if (r == peer && flag.load() >= target) return;
      if (r != peer && page(r).seat.load() == 2) continue;
      // It may have published and then gone: look once more after asking.
      const bool left_seat = page(r).seat.load() == 2;
      if (!left_seat && watches_[r]->alive()) continue;
      if (flag.load() >= target) return;
      check_alive(r, what);
    }
  }
}

void Group::separate_from(int peer) {
  if (crowded_ || peer < 0) return;
  const int here = sched_getcpu();
  page(rank_).core.store(here, std::memory_order_relaxed);
  // One of two moves, else both might meet again; and not more often than the scheduler would.
  if (rank_ < peer || page(peer).core.load(std::memory_order_relaxed) != here) return;
  constexpr std::chrono::nanoseconds pause = std::chrono::milliseconds(2);
  const std::int64_t now = Deadline::Clock::now().time_since_epoch().count();
  if (now - separated_.load(std::memory_order_relaxed) < pause.count()) return;
  separated_.store(now, std::memory_order_relaxed);
  cpu_set_t busy;
  CPU_ZERO(&busy);
  for (int r = 0; r < size_; ++r) CPU_SET(page(r).core.load(std::memory_order_relaxed), &busy);
  move_off(busy);
  page(rank_).core.store(sched_getcpu(), std::memory_order_relaxed);
}

void Group::check_alive(int peer, const std::string& what) {
  const int pid = pid_of(peer);
  if (page(peer).seat.load() == 2)
    fail(Status::peer_lost, str(what, ": rank ", peer, " (pid ", pid,
                                ") has left the group: it closed its communicator"));
  else if (!watches_[peer]->alive())
    fail(Status::peer_lost, str(what, ": rank ", peer, " (pid ", pid, ") died"));
  else
    return;
  throw_unusable();
}

std::string Group::absence(int peer, const Deadline& deadline) const {
  const CallHeader& a = page(peer).calls[0];
  const CallHeader& b = page(peer).calls[1];
  const CallHeader& last = a.arrived.load() > b.arrived.load() ? a : b;
  const std::uint64_t number = last.arrived.load();
  std::string text = str("rank ", peer, " (pid ", pid_of(peer), ") absent after ",
                         deadline.timeout_seconds(), " s (process ", watches_[peer]->state(), ", ");
  text += number == 0 ? "no call yet)" : str("last call #", number, " ", name_of(last.op), ")");
  return text;
}

void Group::fail(Status status, std::string_view text) noexcept {
  if (fork_generation() != fork_generation_) return;
  GroupPage& page = group_page();
  std::uint32_t none = 0;
  if (!page.failed.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) return;
  page.status = status;
  page.text[text.copy(page.text, sizeof page.text - 1)] = '\0';
  page.failed.store(2, std::memory_order_release);
  wake_everybody();
}

std::string Group::failure() const {
  if (fork_generation() != fork_generation_)
    return str(
        "group ", name_,
        ": this process is a fork of a rank and no rank itself; make a communicator in the child");
  if (closed_.load()) return str("group ", name_, ": the communicator is closed");
  const GroupPage& page = group_page();
  if (page.failed.load(std::memory_order_acquire) == 0) return "";
  // Being written: microseconds, unless its writer died there.
  for (int i = 0; i < 1000 && page.failed.load(std::memory_order_acquire) != 2; ++i)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  if (page.failed.load(std::memory_order_acquire) != 2)
    return str("group ", name_, ": broken by a rank that died");
  return page.text;
}

void Group::throw_unusable() const {
  const std::string text = failure();
  if (fork_generation() != fork_generation_ || closed_.load()) throw Closed(text);
  throw_status(group_page().status == Status::ok ? Status::aborted : group_page().status, text);
}

void Group::close() noexcept {
  if (fork_generation() != fork_generation_ || closed_.exchange(true)) return;
  page(rank_).seat.publish(2);
  wake_everybody();
}

void Group::wake_everybody() noexcept {
  for (int r = 0; r < size_; ++r) {
    RankPage& page = this->page(r);
    for (Flag* flag : {&page.calls[0].arrived, &page.calls[1].arrived, &page.ready, &page.done,
                       &page.bell, &page.seat})
      if (flag->sleepers.load() != 0) flag->wake();
  }
}

}  // namespace pyparallel::shm
