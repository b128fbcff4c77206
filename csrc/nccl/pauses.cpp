// Communicators that stop for a while: revoked, or suspended.
#include "base/error.h"
#include "nccl/background.h"
#include "nccl/communicator.h"
#include "nccl/poll.h"

namespace pyparallel::nccl {
namespace {

// How long a thread that polls gets to leave the library before its work is ended under it.
constexpr std::chrono::milliseconds grace{500};

}  // namespace

void Communicator::require_running(const std::string& what) const {
  const std::lock_guard<std::mutex> lock(state_);
  if (pause_ == Pause::none) return;
  throw InvalidUsageError(str(where(), ": ", what,
                              pause_ == Pause::revoked
                                  ? ": the communicator was revoked; split() or shrink() it, or "
                                    "close it"
                                  : ": the communicator is suspended; call resume() first"));
}

void Communicator::revoke() {
  PYPARALLEL_NCCL_NEED(library(), CommRevoke);
  require_usable();
  require_running("ncclCommRevoke");
  const Deadline deadline = this->deadline();
  const std::string text = "ncclCommRevoke";
  {
    const std::lock_guard<std::mutex> lock(state_);
    pause_ = Pause::revoked;
  }
  // Whoever is stuck inside the library holds the lock, and this call is what ends that.
  std::unique_lock<CallMutex> lock(calls_, std::defer_lock);
  static_cast<void>(lock.try_lock_for(std::min<Deadline::Duration>(grace, deadline.remaining())));
  const RawComm handle = this->handle();
  const auto result = std::make_shared<Result>(Result::in_progress);
  const auto call = [library = library_, handle, result] {
    *result = (*library)->CommRevoke(handle, revoke_default);
  };
  bool returned = true;
  if (blocking_) {
    returned = run_with_deadline(call, deadline);
  } else {
    call();
  }
  Result state = returned ? *result : Result::in_progress;
  for (Poll poll; !blocking_ && state == Result::in_progress && !deadline.expired(); poll.pause()) {
    if (failed_.load()) throw_failure();
    const Result asked = library()->CommGetAsyncError(handle, &state);
    if (asked != Result::success) state = asked;
  }
  if (state == Result::in_progress) {
    fail(Status::timeout, str(text, " is not done after ", deadline.timeout_seconds(), " s"));
    end_after_failure();
    throw_failure();
  }
  unsettled_ = false;
  finish(state, handle, text, deadline);
}

void Communicator::suspend() {
  PYPARALLEL_NCCL_NEED(library(), CommSuspend);
  PYPARALLEL_NCCL_NEED(library(), CommResume);
  const Deadline deadline = this->deadline();
  const auto lock = enter("ncclCommSuspend", deadline);
  require_running("ncclCommSuspend");
  const RawComm handle = this->handle();
  release_pending(handle);
  finish(library()->CommSuspend(handle, suspend_memory), handle, "ncclCommSuspend", deadline);
  const std::lock_guard<std::mutex> state(state_);
  pause_ = Pause::suspended;
}

void Communicator::resume() {
  PYPARALLEL_NCCL_NEED(library(), CommResume);
  const Deadline deadline = this->deadline();
  const auto lock = enter("ncclCommResume", deadline);
  {
    const std::lock_guard<std::mutex> state(state_);
    PYPARALLEL_REQUIRE(pause_ == Pause::suspended, where(), ": resume() without suspend()");
  }
  const RawComm handle = this->handle();
  finish(library()->CommResume(handle), handle, "ncclCommResume", deadline);
  const std::lock_guard<std::mutex> state(state_);
  pause_ = Pause::none;
}

MemoryStats Communicator::memory_stats() {
  PYPARALLEL_NCCL_NEED(library(), CommMemStats);
  const auto lock = enter("ncclCommMemStats", deadline());
  const RawComm handle = this->handle();
  const auto ask = [&](MemoryStat stat) {
    std::uint64_t value = 0;
    finish(library()->CommMemStats(handle, stat, &value), handle, "ncclCommMemStats", deadline());
    return value;
  };
  MemoryStats stats;
  stats.suspendable = ask(MemoryStat::suspendable);
  stats.persistent = ask(MemoryStat::persistent);
  stats.total = ask(MemoryStat::total);
  stats.suspended = ask(MemoryStat::suspended) != 0;
  return stats;
}

}  // namespace pyparallel::nccl
