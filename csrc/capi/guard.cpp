#include "capi/guard.h"

#include <cstring>

namespace pyparallel::capi {
namespace {
thread_local char last_error[4096];
}

pyparallel_status_t fail(Status status, const char* what) noexcept {
  std::strncpy(last_error, what, sizeof last_error - 1);
  last_error[sizeof last_error - 1] = '\0';
  return static_cast<pyparallel_status_t>(status);
}

shm::Communicator& seat_of(pyparallel_comm_t comm) {
  require(comm != nullptr, "the communicator is NULL: not joined, or destroyed");
  return *comm->seat;
}

std::chrono::milliseconds timeout_of(std::chrono::milliseconds usual, std::int64_t timeout_ms) {
  if (timeout_ms == PYPARALLEL_DEFAULT_TIMEOUT) return usual;
  require(timeout_ms >= 0, "timeout of ", timeout_ms,
          " ms; expected at least 0, or PYPARALLEL_DEFAULT_TIMEOUT");
  return std::chrono::milliseconds(timeout_ms);
}

DType dtype_of(pyparallel_dtype_t dtype) {
  require(dtype >= 0 && dtype < static_cast<int>(DType::count_), "unknown dtype ", dtype,
          "; known are 0 to ", static_cast<int>(DType::count_) - 1);
  return static_cast<DType>(dtype);
}

shm::Reduction reduction_of(pyparallel_op_t op, double factor) {
  require(op >= 0 && op < static_cast<int>(ReduceOp::count_), "unknown operation ", op,
          "; known are 0 to ", static_cast<int>(ReduceOp::count_) - 1);
  return shm::Reduction{static_cast<ReduceOp>(op), factor};
}

}  // namespace pyparallel::capi

extern "C" {

const char* pyparallel_last_error(void) { return pyparallel::capi::last_error; }

const char* pyparallel_version(void) { return PYPARALLEL_VERSION; }

void pyparallel_abi_version(int32_t* major, int32_t* minor) {
  if (major != nullptr) *major = PYPARALLEL_ABI_MAJOR;
  if (minor != nullptr) *minor = PYPARALLEL_ABI_MINOR;
}

const char* pyparallel_status_name(pyparallel_status_t status) {
  constexpr const char* names[] = {
      "ok",      "invalid argument", "mismatch",    "timeout", "peer lost",
      "aborted", "closed",           "no memory",   "system",  "nccl",
      "cuda",    "unsupported",      "interrupted", "internal"};
  constexpr int known = sizeof names / sizeof names[0];
  return status >= 0 && status < known ? names[status] : "unknown status";
}

size_t pyparallel_dtype_size(pyparallel_dtype_t dtype) {
  if (dtype < 0 || dtype >= static_cast<int>(pyparallel::DType::count_)) return 0;
  return pyparallel::size_of(static_cast<pyparallel::DType>(dtype));
}

}  // extern "C"
