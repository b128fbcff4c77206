// The three compiled forms of reduce_template.h; reduce.cpp chooses one when first asked.
#pragma once

#include <cstddef>

#include "shm/reduce.h"

namespace pyparallel::shm {

struct ReduceKernels {
  const char* name;
  // As reduce() of reduce.h, for checked arguments, n >= 2 or an operation that changes one input.
  void (*reduce)(const ReduceArgs& args);
  // Copies past the caches, and orders the copy before every later store.
  void (*copy_streamed)(void* out, const void* in, std::size_t bytes);
};

extern const ReduceKernels kernels_portable;
#if defined(__x86_64__)
extern const ReduceKernels kernels_avx2;    // AVX2, F16C
extern const ReduceKernels kernels_avx512;  // AVX-512 F, BW, DQ, VL
#endif

}  // namespace pyparallel::shm
