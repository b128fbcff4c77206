// The waiting half of send/recv: who waits for a transfer, what a sleeper looks after, the thread
// that moves what nobody waits for, and how transfers end when they cannot be finished.

#include <algorithm>
#include <cstring>

#include "base/interrupt.h"
#include "shm/point_to_point.h"

namespace pyparallel::shm {
namespace {

constexpr std::chrono::milliseconds kLookAround(10);

}  // namespace

// Which peers were gone when a sleeper looked after its transfers, now and the time before. Only
// what both looks say counts: between them all has been taken in that the peer sent before it went.
class PointToPoint::Gone {
 public:
  explicit Gone(int size) : before_(size, false), now_(size, false) {}
  void next_look() {
    before_.swap(now_);
    std::fill(now_.begin(), now_.end(), false);
  }
  bool at_both_looks(int peer, bool gone) {
    now_[peer] = gone;
    return gone && before_[peer];
  }

 private:
  std::vector<bool> before_, now_;
};

void PointToPoint::end_all(const Cause& cause) noexcept {
  if (!cause.named) group_->fail(cause.status, cause.text);
  const auto end = [&](Transfer& transfer) {
    if (transfer.done()) return;
    transfer.status_ = cause.status;
    try {
      transfer.error_ = cause.text;
    } catch (const std::bad_alloc&) {  // the status says it
    }
    finish(transfer);
  };
  for (auto& queue : sends_) {
    for (auto& send : queue) end(*send);
    queue.clear();
  }
  for (auto& receive : receives_) end(*receive);
  receives_.clear();
  for (auto& incoming : incoming_) {
    if (incoming->receive != nullptr) end(*std::exchange(incoming->receive, nullptr));
    for (auto& message : incoming->unexpected)
      if (message.claimed != nullptr) end(*std::exchange(message.claimed, nullptr));
    incoming->arriving = false;
    incoming->target = nullptr;
  }
  changed_.notify_all();
}

// What a sleeper does every now and then: throws when the transfer cannot end any more.
void PointToPoint::look_after(const Transfer& transfer, const Deadline* deadline, Gone& gone) {
  group_->throw_if_unusable();
  // A receive from anybody waits for one rank once its message has begun to come.
  const int peer = transfer.peer_ >= 0 ? transfer.peer_ : transfer.source_.load();
  if (deadline != nullptr && deadline->expired()) {
    std::string text = describe(transfer) + ": ";
    text += peer >= 0 && peer != rank_
                ? group_->absence(peer, *deadline)
                : str("nothing came within ", deadline->timeout_seconds(), " s");
    group_->fail(Status::timeout, text);
    group_->throw_if_unusable();
  }
  bool hope = peer == rank_;
  int last = -1;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || (peer >= 0 && peer != r)) continue;
    last = r;
    const bool left = group_->page(r).seat.load() == 2;
    const bool sure = gone.at_both_looks(r, left || !group_->alive(r));
    // Of those who may send to a receive from anybody, one may leave when its part is done.
    if (sure && !(left && peer < 0)) group_->check_alive(r, describe(transfer));
    hope = hope || !sure;
  }
  if (!hope && last >= 0) group_->check_alive(last, describe(transfer));
}

void PointToPoint::wait(Transfer& transfer, const Deadline& deadline) {
  const auto moved_on = [&] {
    if (transfer.done()) return true;
    std::lock_guard lock(mutex_);
    progress();
    return transfer.done();
  };
  struct Waiting {
    std::atomic<int>& count;
    explicit Waiting(std::atomic<int>& waiters) : count(waiters) {
      count.fetch_add(1, std::memory_order_relaxed);
    }
    ~Waiting() { count.fetch_sub(1, std::memory_order_relaxed); }
  } waiting(waiters_);
  try {
    if (!moved_on() && !spin_.spin(moved_on)) {
      group_->separate_from(transfer.peer_ != rank_ ? transfer.peer_ : -1);
      Flag& bell = group_->page(rank_).bell;
      Sleeper sleeper(bell);
      auto looked = Deadline::Clock::now();
      Gone gone(size_);
      for (;;) {
        const std::uint64_t seen = bell.load();
        if (moved_on()) break;
        const auto left = std::min<Deadline::Duration>(deadline.remaining(), kLookAround);
        const bool undisturbed = bell.sleep(seen, left);
        const auto now = Deadline::Clock::now();
        if (undisturbed && now - looked < kLookAround && !deadline.expired()) continue;
        looked = now;
        if (interrupt_requested()) {
          group_->fail(Status::aborted, describe(transfer) + ": interrupted by a signal");
          throw Interrupted(describe(transfer) + ": interrupted");
        }
        if (moved_on()) break;
        gone.next_look();
        look_after(transfer, &deadline, gone);
      }
    }
  } catch (...) {
    const Cause cause = cause_of(std::current_exception());
    // Nothing may be moved into or out of the callers' arrays once this has thrown.
    std::lock_guard lock(mutex_);
    if (!transfer.done()) end_all(cause);
    if (cause.status == Status::interrupted) throw;
  }
  if (transfer.status_ != Status::ok) throw_status(transfer.status_, transfer.error_);
}

void PointToPoint::progress_in_background() {
  std::lock_guard lock(mutex_);
  if (pending_ == 0 || stopped_) return;
  if (!background_running_) {
    guarded([&] {
      try {
        start_thread(
            str("group ", group_->name(), ": the thread that moves messages"),
            [self = shared_from_this()] { self->background(); },
            [self = shared_from_this()](const std::exception_ptr& thrown) noexcept {
              std::lock_guard ending(self->mutex_);
              self->end_all(cause_of(thrown));
              self->background_running_ = false;
            });
      } catch (const SystemError& error) {
        group_->fail(error.status(), error.what());  // nobody would move what is started
        throw;
      }
    });
    background_running_ = true;
  } else if (background_idle_) {
    changed_.notify_all();
  }
}

void PointToPoint::background() {
  // Whoever starts a transfer usually waits for it at once. So this thread is not woken for each:
  // it looks in every now and then, and moves what nobody waits for.
  constexpr std::chrono::milliseconds kPause(1);
  constexpr std::chrono::milliseconds kIdle(100);
  std::unique_lock lock(mutex_);
  Flag& bell = group_->page(rank_).bell;
  auto looked = Deadline::Clock::now();
  auto busy = looked;
  Gone gone(size_);
  while (!stopped_) {
    changed_.wait_for(lock, kPause, [&] { return stopped_; });
    if (pending_ > 0) busy = Deadline::Clock::now();
    if (pending_ == 0 && Deadline::Clock::now() - busy > kIdle) {
      background_idle_ = true;
      changed_.wait(lock, [&] { return stopped_ || pending_ > 0; });
      background_idle_ = false;
      busy = Deadline::Clock::now();
      continue;
    }
    if (stopped_ || pending_ == 0 || waiters_.load(std::memory_order_relaxed) > 0) continue;
    try {
      Sleeper sleeper(bell);
      const std::uint64_t seen = bell.load();
      progress();
      if (pending_ == 0) continue;
      lock.unlock();
      bell.sleep(seen, kLookAround);
      lock.lock();
      if (Deadline::Clock::now() - looked < kLookAround) continue;
      looked = Deadline::Clock::now();
      progress();
      gone.next_look();
      for (auto& queue : sends_)
        if (!queue.empty()) look_after(*queue.front(), nullptr, gone);
      for (auto& receive : receives_) look_after(*receive, nullptr, gone);
      for (auto& incoming : incoming_) {
        if (incoming->receive != nullptr) look_after(*incoming->receive, nullptr, gone);
        for (auto& message : incoming->unexpected)
          if (message.claimed != nullptr) look_after(*message.claimed, nullptr, gone);
      }
      group_->throw_if_unusable();
    } catch (...) {
      const Cause cause = cause_of(std::current_exception());
      if (!lock.owns_lock()) lock.lock();
      end_all(cause);
    }
  }
}

bool PointToPoint::cancel(Transfer& transfer) {
  std::lock_guard lock(mutex_);
  const auto place = std::find_if(receives_.begin(), receives_.end(),
                                  [&](const auto& one) { return one.get() == &transfer; });
  if (place == receives_.end()) return false;
  transfer.status_ = Status::aborted;
  transfer.error_ = describe(transfer) + ": taken back";
  finish(transfer);
  receives_.erase(place);
  return true;
}

void PointToPoint::stop() noexcept {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  end_all({Status::closed, group_->failure(), true});
}

}  // namespace pyparallel::shm
