// One exception class per NCCL result code. The text has the call with its operands, NCCL's name
// and words for the code, and what the library itself kept as its last error.
#pragma once

#include <string>

#include "base/error.h"
#include "nccl/abi.h"

namespace pyparallel::nccl {

class Library;

class ResultError : public NcclError {
 public:
  ResultError(Result code, const std::string& what) : NcclError(what), code_(code) {}
  Result code() const noexcept { return code_; }

 private:
  Result code_;
};

#define PYPARALLEL_NCCL_ERROR_CLASS(Name, code)                                 \
  class Name : public ResultError {                                             \
   public:                                                                      \
    explicit Name(const std::string& what) : ResultError(Result::code, what) {} \
  }
PYPARALLEL_NCCL_ERROR_CLASS(UnhandledCudaError, unhandled_cuda_error);
PYPARALLEL_NCCL_ERROR_CLASS(NcclSystemError, system_error);
PYPARALLEL_NCCL_ERROR_CLASS(InternalError, internal_error);
PYPARALLEL_NCCL_ERROR_CLASS(InvalidArgumentError, invalid_argument);
PYPARALLEL_NCCL_ERROR_CLASS(InvalidUsageError, invalid_usage);
PYPARALLEL_NCCL_ERROR_CLASS(RemoteError, remote_error);
PYPARALLEL_NCCL_ERROR_CLASS(NcclTimeoutError, timeout);
#undef PYPARALLEL_NCCL_ERROR_CLASS

// "ncclInvalidUsage", or "unknown result 42".
std::string name_of(Result code);

// Whether a communicator that gave this code can be used no more.
bool is_fatal(Result code) noexcept;

// "ncclAllReduce(...) failed: ncclInvalidUsage (code 5: invalid usage); NCCL's last error: ..."
// `comm` may be null. `context` (who, where) comes first.
std::string failure_text(const Library& library, Result code, const std::string& call, RawComm comm,
                         const std::string& context);

// Throws the class that belongs to `code`.
[[noreturn]] void throw_result(Result code, const std::string& what);

// Throws when `code` is neither success nor in_progress.
void check(const Library& library, Result code, const std::string& call, RawComm comm = nullptr,
           const std::string& context = {});

}  // namespace pyparallel::nccl
