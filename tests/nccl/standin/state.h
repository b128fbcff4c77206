// What the functions of the stand-in share: noting calls, refusing them, finding communicators.
#pragma once

#include "run.h"

// Every function is declared from the binding's own list: a definition that differs does not
// compile.
namespace standin {
#define STANDIN_PROTOTYPE(name, major, minor, patch, presence, result, parameters) \
  extern "C" result nccl##name parameters;
PYPARALLEL_NCCL_SYMBOLS(STANDIN_PROTOTYPE)
}  // namespace standin

namespace standin {

inline bool has_fault(const char* name) { return std::string(fault) == name; }

inline Result refuse(const std::string& why, Result code = Result::invalid_argument) {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  tests().last_error = why;
  if (group.depth > 0) group.error = code;
  return code;
}

// Notes the call. Gives what a test wants it to return, else success.
inline Result enter(const char* name) {
  Result wanted = Result::success;
  {
    const std::lock_guard<std::mutex> lock(tests().mutex);
    tests().log += std::string(name) + "\n";
    const auto injected = tests().results.find(name);
    if (injected != tests().results.end()) wanted = injected->second;
  }
  return wanted == Result::success ? wanted : refuse(std::string("injected into ") + name, wanted);
}

#define ENTER()                                     \
  do {                                              \
    const Result wanted_ = enter(__func__);         \
    if (wanted_ != Result::success) return wanted_; \
  } while (0)

inline std::shared_ptr<Comm> find(RawComm raw) {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  const auto found = tests().comms.find(raw);
  return found != tests().comms.end() ? found->second : nullptr;
}

inline RawComm publish(const std::shared_ptr<Comm>& comm) {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  const auto raw = reinterpret_cast<RawComm>(comm.get());
  tests().comms[raw] = comm;
  return raw;
}

inline void retire(RawComm raw) {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  tests().comms.erase(raw);
}

// A blocking call that fails leaves nothing; a non-blocking one leaves a handle that says so.
inline Result end_child(const std::shared_ptr<Comm>& parent, const std::shared_ptr<Comm>& child,
                        Result result) {
  child->state = static_cast<int>(result);
  if (parent->blocking && result != Result::success) retire(reinterpret_cast<RawComm>(child.get()));
  return result;
}

// Runs on the caller's thread for a blocking communicator, else behind its back.
inline Result run_job(const std::shared_ptr<Comm>& comm, std::function<Result()> job) {
  ++comm->running;
  if (comm->blocking) {
    const Result result = job();
    --comm->running;
    return result;
  }
  comm->state = static_cast<int>(Result::in_progress);
  std::thread([comm, job = std::move(job)] {
    const Result result = job();
    comm->state = static_cast<int>(result);
    --comm->running;
  }).detach();
  return Result::in_progress;
}

// The communicator, if it may be used for a new call now.
#define READY(comm, raw)                                                              \
  const std::shared_ptr<Comm> comm = find(raw);                                       \
  if (comm == nullptr) return refuse(std::string(__func__) + ": not a communicator"); \
  if (comm->state == static_cast<int>(Result::in_progress)) {                         \
    return refuse(std::string(__func__) + ": the previous call has not finished");    \
  }                                                                                   \
  if (comm->state != 0) return static_cast<Result>(comm->state.load());               \
  if (comm->suspended && std::string(__func__).find("Resume") == std::string::npos && \
      std::string(__func__).find("MemStats") == std::string::npos)                    \
  return refuse(std::string(__func__) + ": suspended", Result::invalid_usage)

Result submit(Call call);

}  // namespace standin
