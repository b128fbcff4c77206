#include "nccl/error.h"

#include "nccl/library.h"

namespace pyparallel::nccl {

std::string name_of(Result code) {
  switch (code) {
    case Result::success:
      return "ncclSuccess";
    case Result::unhandled_cuda_error:
      return "ncclUnhandledCudaError";
    case Result::system_error:
      return "ncclSystemError";
    case Result::internal_error:
      return "ncclInternalError";
    case Result::invalid_argument:
      return "ncclInvalidArgument";
    case Result::invalid_usage:
      return "ncclInvalidUsage";
    case Result::remote_error:
      return "ncclRemoteError";
    case Result::in_progress:
      return "ncclInProgress";
    case Result::timeout:
      return "ncclTimeout";
  }
  return str("unknown result ", static_cast<int>(code));
}

bool is_fatal(Result code) noexcept {
  return code != Result::success && code != Result::in_progress &&
         code != Result::invalid_argument && code != Result::invalid_usage;
}

std::string failure_text(const Library& library, Result code, const std::string& call, RawComm comm,
                         const std::string& context) {
  std::string text = context.empty() ? std::string() : context + ": ";
  text += str(call, " failed: ", name_of(code), " (code ", static_cast<int>(code));
  if (const char* words = library->GetErrorString(code); words != nullptr && *words != '\0') {
    text += str(": ", words);
  }
  text += ")";
  if (library->GetLastError != nullptr) {
    const char* last = library->GetLastError(comm);
    if (last != nullptr && *last != '\0') text += str("; NCCL's last error: ", last);
  }
  return text + "; " + library.describe();
}

void throw_result(Result code, const std::string& what) {
  switch (code) {
    case Result::unhandled_cuda_error:
      throw UnhandledCudaError(what);
    case Result::system_error:
      throw NcclSystemError(what);
    case Result::internal_error:
      throw InternalError(what);
    case Result::invalid_argument:
      throw InvalidArgumentError(what);
    case Result::invalid_usage:
      throw InvalidUsageError(what);
    case Result::remote_error:
      throw RemoteError(what);
    case Result::timeout:
      throw NcclTimeoutError(what);
    default:
      throw ResultError(code, what);
  }
}

void check(const Library& library, Result code, const std::string& call, RawComm comm,
           const std::string& context) {
  if (code == Result::success || code == Result::in_progress) return;
  throw_result(code, failure_text(library, code, call, comm, context));
}

}  // namespace pyparallel::nccl
