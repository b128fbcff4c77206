#include "nccl/background.h"

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/thread.h"
#include "nccl/driver.h"

namespace pyparallel::nccl {
namespace {

struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
  int running = 0;
  bool ending = false;
};

struct Outcome {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;
};

constexpr std::chrono::milliseconds interrupt_period{50};

}  // namespace

bool run_with_deadline(std::function<void()> call, Deadline deadline) {
  auto outcome = std::make_shared<Outcome>();
  const auto finish = [outcome](const std::exception_ptr& error) noexcept {
    const std::lock_guard<std::mutex> lock(outcome->mutex);
    outcome->error = error;
    outcome->done = true;
    outcome->changed.notify_all();
  };
  start_thread(
      "a thread for a call of NCCL that may wait",
      [finish, call = std::move(call), context = current_context()]() mutable {
        if (context != nullptr) use_context(context);
        call();
        call = nullptr;
        finish(nullptr);
      },
      finish);

  std::unique_lock<std::mutex> lock(outcome->mutex);
  while (!outcome->done && !deadline.expired()) {
    const auto slice = std::min<Deadline::Duration>(deadline.remaining(), interrupt_period);
    if (outcome->changed.wait_for(lock, slice, [&] { return outcome->done; })) break;
    lock.unlock();
    if (interrupt_requested()) throw Interrupted("interrupted while waiting for NCCL");
    lock.lock();
  }
  if (outcome->error) std::rethrow_exception(outcome->error);
  return outcome->done;
}

void run_detached(std::function<void()> call) noexcept {
  Shared& state = per_process<Shared>();
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    if (state.ending) return;
    ++state.running;
  }
  const auto ended = [&state] {
    const std::lock_guard<std::mutex> lock(state.mutex);
    --state.running;
    state.changed.notify_all();
  };
  try {
    start_thread(
        "a thread that ends a communicator",
        [ended, call = std::move(call), context = current_context()]() mutable {
          if (context != nullptr) use_context(context);
          call();
          call = nullptr;
          ended();
        },
        [ended](const std::exception_ptr&) noexcept { ended(); });  // nobody is left to tell
  } catch (...) {
    ended();
  }
}

void end_background(Deadline deadline) noexcept {
  Shared& state = per_process<Shared>();
  std::unique_lock<std::mutex> lock(state.mutex);
  state.ending = true;
  state.changed.wait_for(lock, deadline.remaining(), [&] { return state.running == 0; });
}

bool background_ended() noexcept {
  Shared& state = per_process<Shared>();
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.ending;
}

}  // namespace pyparallel::nccl
