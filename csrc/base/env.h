// Every environment variable that the native core reads. docs/environment.md explains each.
#pragma once

#include <string>

namespace pyparallel::env {

// Values are read when asked for; empty when unset.
std::string shm_dir();   // PYPARALLEL_SHM_DIR: put memory files into this tmpfs, not into memfd
std::string simd();      // PYPARALLEL_SIMD: avx512 | avx2 | portable
std::string host_id();   // PYPARALLEL_HOST_ID: ranks with equal values share a host
std::string nccl_lib();  // PYPARALLEL_NCCL_LIB: path of the NCCL library to load
// PYPARALLEL_SPIN_US: how long a waiter spins before it sleeps; default: measured policy (wait.h).
// -1 when unset.
int spin_us();

}  // namespace pyparallel::env
