// State of a communicator: how it waits, fails and ends. How it is made is in making.cpp, data
// calls are in collectives.cpp.
#include "nccl/communicator.h"

#include <algorithm>
#include <utility>

#include "base/fork.h"
#include "nccl/background.h"
#include "nccl/poll.h"
#include "nccl/watchdog.h"

namespace pyparallel::nccl {
namespace {

// How long abort() lets a thread that polls notice; one inside a blocking call is what abort is
// for.
constexpr std::chrono::milliseconds abort_grace{500};
constexpr std::chrono::seconds background_abort{60};
constexpr std::chrono::seconds explanation{2};

}  // namespace

Communicator::~Communicator() {
  // Without CommAbort (before 2.4) the handle can only be left.
  if (handle_ == nullptr || fork_generation_ != fork_generation()) return;
  if (library()->CommAbort == nullptr) return;
  run_detached([library = library_, handle = handle_] { (*library)->CommAbort(handle); });
}

// --- state

std::string Communicator::where() const {
  return str("communicator ", options_.name, " (rank ", rank_, " of ", size_, ", device ", device_,
             ")");
}

bool Communicator::closed() const {
  const std::lock_guard<std::mutex> lock(state_);
  return closed_;
}

bool Communicator::revoked() const {
  const std::lock_guard<std::mutex> lock(state_);
  return pause_ == Pause::revoked;
}

std::string Communicator::failure() const {
  const std::lock_guard<std::mutex> lock(state_);
  return failure_;
}

void Communicator::require_usable(bool after_failure) const {
  if (fork_generation_ != fork_generation()) {
    throw Closed(str(where(), ": made before fork(); a child process must make its own"));
  }
  const std::lock_guard<std::mutex> lock(state_);
  if (!failure_.empty() && !(after_failure && handle_ != nullptr)) {
    throw Aborted(str(where(), " is broken: ", failure_));
  }
  if (closed_ || handle_ == nullptr) throw Closed(str(where(), " is closed"));
}

RawComm Communicator::handle() {
  require_usable();
  const std::lock_guard<std::mutex> lock(state_);
  return handle_;
}

RawComm Communicator::take_handle() noexcept {
  const std::lock_guard<std::mutex> lock(state_);
  closed_ = true;
  return std::exchange(handle_, nullptr);
}

bool Communicator::fail(Status status, const std::string& why) noexcept {
  const std::lock_guard<std::mutex> lock(state_);
  if (!failure_.empty() || closed_) return false;
  failure_status_ = status;
  failure_ = why;
  failed_.store(true);
  return true;
}

void Communicator::throw_failure() const {
  std::unique_lock<std::mutex> lock(state_);
  const Status status = failure_status_;
  const std::string why = failure_;
  lock.unlock();
  throw_status(status, str(where(), ": ", why));
}

void Communicator::end_after_failure() noexcept {
  if (!options_.abort_on_error) return;
  run_detached([self = shared_from_this()] {
    self->abort("an earlier failure", Deadline::after(background_abort));
  });
}

std::string Communicator::explained(const std::string& what) const {
  if (!options_.explain) return what;
  try {
    const auto text = std::make_shared<std::string>();
    const auto ask = [text, explain = options_.explain] { *text = explain(); };
    if (run_with_deadline(ask, Deadline::after(explanation))) return str(what, "; ", *text);
  } catch (const std::exception&) {
    // Whoever knows is out of reach: the timeout itself is the news.
  }
  return what;
}

void Communicator::watchdog_tick() noexcept {
  try {
    std::string found;
    Status status = Status::nccl;
    {
      const std::lock_guard<std::mutex> lock(state_);
      if (handle_ == nullptr || !failure_.empty()) return;
      Result state = Result::success;
      if (library()->CommGetAsyncError != nullptr &&
          library()->CommGetAsyncError(handle_, &state) == Result::success && is_fatal(state)) {
        found = failure_text(library(), state, "background work", handle_, "");
      }
    }
    if (found.empty()) {
      found = watch_->overdue();
      status = Status::timeout;
      if (!found.empty()) found = explained(found);
    }
    if (!found.empty() && fail(status, found)) end_after_failure();
  } catch (const std::exception& error) {
    if (fail(Status::internal, str("the watchdog cannot ask: ", error.what()))) end_after_failure();
  }
}

void Communicator::check_async() {
  const auto lock = enter("ncclCommGetAsyncError", deadline());
  PYPARALLEL_NCCL_NEED(library(), CommGetAsyncError);
  Result state = Result::success;
  const RawComm handle = this->handle();
  finish(library()->CommGetAsyncError(handle, &state), handle, "ncclCommGetAsyncError", deadline());
  if (state != Result::in_progress) finish(state, handle, "background work", deadline());
}

// --- calls

std::unique_lock<CallMutex> Communicator::enter(const std::string& text, Deadline deadline,
                                                bool after_failure) {
  require_usable(after_failure);
  std::unique_lock<CallMutex> lock(calls_, std::defer_lock);
  if (!lock.try_lock_for(deadline.remaining())) {
    throw Timeout(str(where(), ": ", text, " waited ", deadline.timeout_seconds(),
                      " s for another thread's call on this communicator"));
  }
  require_usable(after_failure);
  return lock;
}

void Communicator::settle(RawComm handle, const std::string& text, Deadline deadline) {
  unsettled_ = true;  // until the library says otherwise: Ctrl-C may end this wait
  for (Poll poll;; poll.pause()) {
    if (failed_.load()) throw_failure();
    Result state = Result::success;
    Result asked = library()->CommGetAsyncError(handle, &state);
    if (asked == Result::success) asked = state;
    if (asked == Result::in_progress) {
      if (!deadline.expired()) continue;
      fail(Status::timeout, explained(str(text, " is not done after ", deadline.timeout_seconds(),
                                          " s: a peer has not come, or is stuck")));
      end_after_failure();
      throw_failure();
    }
    unsettled_ = false;
    return finish(asked, handle, text, deadline);
  }
}

void Communicator::finish(Result result, RawComm handle, const std::string& text,
                          Deadline deadline) {
  if (result == Result::success) return;
  if (result == Result::in_progress) return settle(handle, text, deadline);
  if (failed_.load()) throw_failure();  // the call came back because of an abort
  const std::string what = failure_text(library(), result, text, handle, where());
  if (is_fatal(result) && fail(Status::nccl, what)) end_after_failure();
  throw_result(result, what);
}

void Communicator::release_pending(RawComm handle) noexcept {
  std::vector<std::function<Result(RawComm)>> releases;
  {
    const std::lock_guard<std::mutex> lock(state_);
    releases.swap(pending_);
  }
  for (const auto& release : releases) release(handle);
}

void Communicator::release_all(RawComm handle) noexcept {
  release_pending(handle);
  std::map<std::uintptr_t, Range> registered, windows;
  {
    const std::lock_guard<std::mutex> lock(state_);
    registered.swap(registered_);
    windows.swap(windows_);
  }
  for (const auto& [first, range] : windows) range.release(handle);
  for (const auto& [first, range] : registered) range.release(handle);
}

// --- ends

void Communicator::close(Deadline deadline) {
  if (fork_generation_ != fork_generation() || closed()) return;
  if (failed_.load()) {
    abort("closed after a failure", deadline);
    return;
  }
  std::unique_lock<CallMutex> lock(calls_, std::defer_lock);
  std::string fault;
  if (!lock.try_lock_for(deadline.remaining())) {
    fault = "another thread's call has not returned";
  } else if (const RawComm handle = closed() ? nullptr : this->handle(); handle != nullptr) {
    release_all(handle);
    // What was revoked must not be finalized.
    if (library()->CommFinalize != nullptr && !revoked()) {
      try {
        const auto finalized = std::make_shared<Result>(Result::success);
        const auto finalize = [library = library_, handle, finalized] {
          *finalized = (*library)->CommFinalize(handle);
        };
        bool done = true;
        if (blocking_) {
          done = run_with_deadline(finalize, deadline);
        } else {
          finalize();
        }
        Result state = done ? *finalized : Result::in_progress;
        for (Poll poll; !blocking_ && state == Result::in_progress && !deadline.expired();
             poll.pause()) {
          if (failed_.load()) throw_failure();
          check(library(), library()->CommGetAsyncError(handle, &state), "ncclCommGetAsyncError",
                handle);
        }
        if (state == Result::in_progress) {
          fault = "peers have not finished what was started";
        } else if (state != Result::success) {
          fault = failure_text(library(), state, "ncclCommFinalize", handle, "");
        }
      } catch (const Error& error) {
        fault = error.what();
        if (error.status() == Status::interrupted) {  // half finalized: of no more use to anyone
          lock.unlock();
          abort("close() was interrupted", Deadline::after(std::chrono::seconds(2)));
          throw;
        }
      }
    }
  }
  if (!fault.empty()) {
    const std::string what = str("close() after ", deadline.timeout_seconds(), " s: ", fault);
    if (lock.owns_lock()) lock.unlock();
    abort(what, Deadline::after(std::chrono::seconds(2)));
    throw Timeout(str(where(), ": ", what, "; the communicator was aborted instead"));
  }
  const RawComm handle = take_handle();
  if (handle == nullptr) return;
  const auto destroyed = std::make_shared<Result>(Result::success);
  const bool done = run_with_deadline(
      [library = library_, handle, destroyed] { *destroyed = (*library)->CommDestroy(handle); },
      deadline);
  if (!done) {
    throw Timeout(str(where(), ": ncclCommDestroy has not returned after ",
                      deadline.timeout_seconds(),
                      " s, some peer has not destroyed its part; it goes on in the background"));
  }
  check(library(), *destroyed, "ncclCommDestroy", nullptr, where());
}

bool Communicator::abort(const std::string& why, Deadline deadline) noexcept {
  try {
    if (fork_generation_ != fork_generation()) return true;
    fail(Status::aborted, why);
    // A thread that polls sees the failure and leaves; it must not use the handle any more by then.
    std::unique_lock<CallMutex> lock(calls_, std::defer_lock);
    static_cast<void>(
        lock.try_lock_for(std::min<Deadline::Duration>(abort_grace, deadline.remaining())));
    const RawComm handle = take_handle();
    if (handle == nullptr || library()->CommAbort == nullptr) return true;
    return run_with_deadline([library = library_, handle] { (*library)->CommAbort(handle); },
                             deadline);
  } catch (...) {
    return false;  // interrupted, or no thread to be had
  }
}

void process_ends(Deadline deadline) noexcept { end_background(deadline); }

}  // namespace pyparallel::nccl
