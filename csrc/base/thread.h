// Threads of the core: the only place that starts one. Nothing may escape a thread's function (it
// would end the process, and every rank with it), and a system that has no thread left says so.
#pragma once

#include <exception>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace pyparallel {

// Starts a detached thread that runs `body`; `escaped` gets whatever that throws, as an
// exception_ptr, and must not throw itself. Gives the thread's id. Throws SystemError, naming
// `what` ("group tp: the thread of queued calls"), where no thread can be started; then nothing
// runs.
template <typename Body, typename Escaped>
std::thread::id start_thread(const std::string& what, Body body, Escaped escaped) {
  static_assert(std::is_nothrow_invocable_v<Escaped&, std::exception_ptr>,
                "nobody is left to catch what this throws");
  try {
    std::thread thread([body = std::move(body), escaped = std::move(escaped)]() mutable {
      try {
        Body run = std::move(body);  // gone, with what it holds, before `escaped` tells anybody
        run();
      } catch (...) {
        escaped(std::current_exception());
      }
    });
    const std::thread::id id = thread.get_id();
    thread.detach();
    return id;
  } catch (const std::system_error& error) {
    throw SystemError(str(what, " cannot be started: ", error.what(),
                          "; ulimit -u and the cgroup's pids.max limit threads"));
  }
}

// What an exception says, and the status that belongs to it.
struct Cause {
  Status status = Status::internal;
  std::string text;
  bool named = false;  // thrown as one of our own classes
};
Cause cause_of(const std::exception_ptr& thrown) noexcept;

}  // namespace pyparallel
