// Calls that may take longer than their caller can wait: each runs on a thread of its own, and the
// caller leaves it there when its deadline comes. NCCL's blocking calls have no deadline
// themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>

#include "base/deadline.h"
#include "base/fork.h"

namespace pyparallel::nccl {

// An object of the process, made when first asked for and never destroyed, since threads may
// outlive static objects. A forked child, which has none of the threads, gets another one.
template <typename T>
T& per_process() {
  static std::mutex mutex;
  static T* object = nullptr;
  static std::uint32_t generation = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (object == nullptr || generation != fork_generation()) {
    object = new T;
    generation = fork_generation();
  }
  return *object;
}

// Runs `call` on another thread with this thread's CUDA context. Gives true when it is done, false
// when the deadline came first: it goes on then, so it must own what it uses. Throws what `call`
// throws, and Interrupted.
bool run_with_deadline(std::function<void()> call, Deadline deadline);

// Starts `call` with this thread's CUDA context and returns. For destructors: never throws; when no
// thread can be had, or the process is ending, the call is not made.
void run_detached(std::function<void()> call) noexcept;

// After this run_detached() does nothing. Waits for the calls under way until the deadline.
void end_background(Deadline deadline) noexcept;
bool background_ended() noexcept;

}  // namespace pyparallel::nccl
