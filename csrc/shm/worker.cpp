#include "shm/worker.h"

#include "base/error.h"
#include "base/interrupt.h"
#include "base/thread.h"

namespace pyparallel::shm {
namespace {

// Waits on a condition variable in slices, so that a signal can end the wait. False at the
// deadline.
template <typename Done>
bool wait_on(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
             const Deadline& deadline, const Done& done) {
  constexpr std::chrono::milliseconds slice(50);
  while (!done()) {
    const auto left = std::min<Deadline::Duration>(deadline.remaining(), slice);
    if (left.count() == 0) return false;
    if (changed.wait_for(lock, left, done)) break;
    lock.unlock();
    const bool stop = interrupt_requested();
    lock.lock();
    if (stop) throw Interrupted("wait for an asynchronous call: interrupted");
  }
  return true;
}

}  // namespace

class Worker::Job : public Work {
 public:
  Job(std::string name, std::function<void()> call)
      : name_(std::move(name)), call_(std::move(call)) {}

  void run() noexcept {
    std::exception_ptr error;
    try {
      call_();
    } catch (...) {
      error = std::current_exception();
    }
    finish(error);
  }
  void finish(std::exception_ptr error) noexcept {
    call_ = nullptr;  // lets go of the arrays before anybody hears that the call is done
    {
      std::lock_guard lock(mutex_);
      error_ = error;
      done_.store(true, std::memory_order_release);
    }
    changed_.notify_all();
  }

  bool done() const override { return done_.load(std::memory_order_acquire); }
  void wait(Deadline deadline) override {
    if (!done()) {
      std::unique_lock lock(mutex_);
      if (!wait_on(changed_, lock, deadline, [&] { return done(); }))
        throw Timeout(str("group ", name_, ": an asynchronous call is not done after ",
                          deadline.timeout_seconds(), " s"));
    }
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  const std::string name_;
  std::function<void()> call_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr error_;
  std::atomic<bool> done_{false};
};

std::shared_ptr<Work> Worker::enqueue(std::function<void()> call) {
  auto job = std::make_shared<Job>(state_->name, std::move(call));
  std::lock_guard lock(state_->mutex);
  if (state_->stopped) throw Closed(str("group ", state_->name, ": the communicator is closed"));
  if (!state_->running) {
    start_thread(
        str("group ", state_->name, ": the thread of asynchronous calls"),
        [state = state_] { run(state); },
        [state = state_](const std::exception_ptr& thrown) noexcept { stop(*state, thrown); });
    state_->running = true;
  }
  state_->queue.push_back(job);
  state_->unfinished.fetch_add(1, std::memory_order_acq_rel);
  state_->changed.notify_all();
  return job;
}

void Worker::run(const std::shared_ptr<State>& state) {
  state->thread.store(std::this_thread::get_id());
  std::unique_lock lock(state->mutex);
  for (;;) {
    state->changed.wait(lock, [&] { return state->stopped || !state->queue.empty(); });
    if (state->queue.empty()) return;
    std::shared_ptr<Job> job = std::move(state->queue.front());
    state->queue.pop_front();
    lock.unlock();
    job->run();
    job.reset();
    lock.lock();
    state->unfinished.fetch_sub(1, std::memory_order_acq_rel);
    state->changed.notify_all();
  }
}

void Worker::drain(const Deadline& deadline) {
  if (idle() || on_this_thread()) return;
  std::unique_lock lock(state_->mutex);
  if (!wait_on(state_->changed, lock, deadline, [&] { return idle(); }))
    throw Timeout(str("group ", state_->name, ": calls queued before this one are not done after ",
                      deadline.timeout_seconds(), " s"));
}

void Worker::stop() noexcept {
  stop(*state_, std::make_exception_ptr(
                    Closed(str("group ", state_->name, ": the communicator is closed"))));
}

void Worker::stop(State& state, const std::exception_ptr& why) noexcept {
  std::deque<std::shared_ptr<Job>> dropped;
  {
    std::lock_guard lock(state.mutex);
    state.stopped = true;
    dropped.swap(state.queue);
    state.unfinished.fetch_sub(dropped.size(), std::memory_order_acq_rel);
  }
  state.changed.notify_all();
  for (auto& job : dropped) job->finish(why);
}

}  // namespace pyparallel::shm
