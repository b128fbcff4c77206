// What a kernel asks of the place where it runs, apart from memory order: where am I, meet my
// block, what time is it. Two bodies: CUDA, and the host emulation of tests/cuda/emulation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyparallel::cuda {

// All ranks' workspaces at once.
struct Multicast {
  char* base;          // where multimem instructions reach them
  void* const* peers;  // the same memory, rank by rank: for the emulation, which has no switch
  std::uint32_t world;
};

}  // namespace pyparallel::cuda

#if defined(__CUDACC__)

#define PYPARALLEL_DEVICE __device__ __forceinline__
#define PYPARALLEL_HOST_DEVICE __host__ __device__ __forceinline__
// No block has more threads than this; a thread may have 128 registers.
#define PYPARALLEL_KERNEL __global__ void __launch_bounds__(512, 1)
// The argument block of a kernel, read in place from constant memory, also with a run-time index.
#define PYPARALLEL_KERNEL_ARGUMENT(type) const __grid_constant__ type

namespace pyparallel::cuda {

struct Place {
  unsigned thread, threads, block, blocks;
};
PYPARALLEL_DEVICE Place here() { return {threadIdx.x, blockDim.x, blockIdx.x, gridDim.x}; }

// All threads of the block meet; what each wrote before, all see after.
PYPARALLEL_DEVICE void meet() { __syncthreads(); }
// The same, and tells all whether any of them said true.
PYPARALLEL_DEVICE bool meet_any(bool mine) { return __syncthreads_or(mine) != 0; }

// Nanoseconds of a clock that runs evenly; its steps may be as coarse as a microsecond.
PYPARALLEL_DEVICE std::uint64_t clock_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
// Between two polls: at first nothing (a flag usually comes within a microsecond), later a short
// sleep that leaves memory and issue slots to those who work.
PYPARALLEL_DEVICE void pause_polling(unsigned polls) {
  if (polls > 256) __nanosleep(100);
}

}  // namespace pyparallel::cuda

#else
#define PYPARALLEL_HOST_DEVICE inline
#if defined(PYPARALLEL_CUDA_EMULATION)
#include "emulated_device.h"
#endif
#endif
