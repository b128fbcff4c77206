// One exception class per cause. The C ABI turns them into status codes (capi.cpp), the Python
// module into exceptions (python/errors.cpp). Messages follow one shape: what was asked, what was
// found, where (op #sequence, group, rank), and what would work.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace pyparallel {

// Values are part of the C ABI: append only.
enum class Status : std::int32_t {
  ok = 0,
  invalid_argument = 1,  // the caller's arguments, checked before any communication
  mismatch = 2,          // ranks called different things; every rank raises
  timeout = 3,           // a deadline passed; the message names the ranks that have not come
  peer_lost = 4,         // a rank's process died, or it closed its communicator
  aborted = 5,           // someone called abort(), or an earlier failure broke the communicator
  closed = 6,            // used after close(), or in a forked child
  no_memory = 7,         // shared memory: the message has needed and free bytes
  system = 8,            // an operating system call failed
  nccl = 9,
  cuda = 10,
  unsupported = 11,  // this build or machine cannot; the message says what would be needed
  interrupted = 12,  // a signal (SIGINT) ended the wait
  internal = 13,
};

class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& what) : std::runtime_error(what), status_(status) {}
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

#define PYPARALLEL_ERROR_CLASS(Name, code)                                \
  class Name : public Error {                                             \
   public:                                                                \
    explicit Name(const std::string& what) : Error(Status::code, what) {} \
  }
PYPARALLEL_ERROR_CLASS(InvalidArgument, invalid_argument);
PYPARALLEL_ERROR_CLASS(Mismatch, mismatch);
PYPARALLEL_ERROR_CLASS(Timeout, timeout);
PYPARALLEL_ERROR_CLASS(PeerLost, peer_lost);
PYPARALLEL_ERROR_CLASS(Aborted, aborted);
PYPARALLEL_ERROR_CLASS(Closed, closed);
PYPARALLEL_ERROR_CLASS(NoMemory, no_memory);
PYPARALLEL_ERROR_CLASS(SystemError, system);
PYPARALLEL_ERROR_CLASS(NcclError, nccl);
PYPARALLEL_ERROR_CLASS(CudaError, cuda);
PYPARALLEL_ERROR_CLASS(Unsupported, unsupported);
PYPARALLEL_ERROR_CLASS(Interrupted, interrupted);
#undef PYPARALLEL_ERROR_CLASS

// Throws the class that belongs to `status`.
[[noreturn]] void throw_status(Status status, const std::string& what);

// str(1, " of ", x): the pieces streamed one after another.
template <typename... Pieces>
std::string str(const Pieces&... pieces) {
  std::ostringstream out;
  (out << ... << pieces);
  return out.str();
}

// "open(/x): No such file or directory (errno 2)"
std::string errno_text(const std::string& call, int error_number);

}  // namespace pyparallel

// Checks an argument; the rest are the pieces of the message.
#define PYPARALLEL_REQUIRE(condition, ...)                                                 \
  do {                                                                                     \
    if (!(condition)) throw ::pyparallel::InvalidArgument(::pyparallel::str(__VA_ARGS__)); \
  } while (0)

// Checks a system call that returns -1 and sets errno; gives its value.
#define PYPARALLEL_SYSCALL(call)                                                                \
  ([&] {                                                                                        \
    auto result_ = (call);                                                                      \
    if (result_ == -1) throw ::pyparallel::SystemError(::pyparallel::errno_text(#call, errno)); \
    return result_;                                                                             \
  }())
