#include "torch/worker.h"

#include <algorithm>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/thread.h"

namespace pyparallel::dist {

bool CallWork::done() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

bool CallWork::wait_for(std::chrono::nanoseconds time) const {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, time, [this] { return done_; });
}

void CallWork::rethrow() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void CallWork::wait(Deadline deadline) {
  constexpr std::chrono::milliseconds interrupt_interval(50);
  while (!wait_for(std::min<Deadline::Duration>(interrupt_interval, deadline.remaining()))) {
    if (deadline.expired()) {
      throw Timeout(str(name_, ": not done after ", deadline.timeout_seconds(), " s"));
    }
    if (interrupt_requested()) throw Interrupted(str(name_, ": a signal ended the wait"));
  }
  rethrow();
}

void CallWork::finish(std::exception_ptr error, int source) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (done_) return;
    done_ = true;
    source_ = source;
    error_ = std::move(error);
  }
  changed_.notify_all();
}

Worker::Worker(std::string name) : state_(std::make_shared<State>()) {
  state_->name = std::move(name);
  thread_id_ = start_thread(
      str(state_->name, ": its thread"), [state = state_] { serve(state); },
      [state = state_](const std::exception_ptr& thrown) noexcept { close(*state, thrown); });
}

void Worker::serve(const std::shared_ptr<State>& state) {
  for (;;) {
    Job job;
    {
      std::unique_lock<std::mutex> lock(state->mutex);
      state->changed.wait(lock, [&] { return state->closed || !state->jobs.empty(); });
      if (state->jobs.empty()) return;
      job = std::move(state->jobs.front());
      state->jobs.pop_front();
    }
    std::exception_ptr error;
    try {
      job.call();
    } catch (...) {
      error = std::current_exception();
    }
    job.call = nullptr;  // lets go of what it holds before anyone hears that it is done
    job.work->finish(std::move(error));
  }
}

std::shared_ptr<CallWork> Worker::add(std::function<void()> call) {
  auto work = std::make_shared<CallWork>(state_->name);
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->closed) throw Closed(str(state_->name, " is closed"));
    state_->jobs.push_back({std::move(call), work});
  }
  state_->changed.notify_one();
  return work;
}

void Worker::close() noexcept {
  close(*state_,
        std::make_exception_ptr(Closed(str(state_->name, " was closed before a queued call ran"))));
}

void Worker::close(State& state, const std::exception_ptr& why) noexcept {
  std::deque<Job> dropped;
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.closed = true;
    dropped.swap(state.jobs);
  }
  state.changed.notify_all();
  for (Job& job : dropped) job.work->finish(why);
}

}  // namespace pyparallel::dist
