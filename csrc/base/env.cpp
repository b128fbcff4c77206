#include "base/env.h"

#include <cstdlib>

#include "base/error.h"

namespace pyparallel::env {
namespace {
std::string text(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}
}  // namespace

std::string shm_dir() { return text("PYPARALLEL_SHM_DIR"); }
std::string simd() { return text("PYPARALLEL_SIMD"); }
std::string host_id() { return text("PYPARALLEL_HOST_ID"); }
std::string nccl_lib() { return text("PYPARALLEL_NCCL_LIB"); }

int spin_us() {
  const std::string value = text("PYPARALLEL_SPIN_US");
  if (value.empty()) return -1;
  char* end = nullptr;
  const long us = std::strtol(value.c_str(), &end, 10);
  PYPARALLEL_REQUIRE(*end == '\0' && us >= 0 && us <= 1000000, "PYPARALLEL_SPIN_US=", value,
                     ": expected microseconds, 0 to 1000000");
  return static_cast<int>(us);
}

}  // namespace pyparallel::env
