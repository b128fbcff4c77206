// Arithmetic on arrays: reduce n inputs into one or two outputs. No communication, no allocation.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace pyparallel::shm {

// Where an output goes: `cached` when it will be read again soon (a staging slot), `streamed` when
// it is large and will not be (non-temporal stores, no read for ownership). A hint only.
enum class Store { cached, streamed };

struct ReduceArgs {
  const void* const* inputs = nullptr;  // [n] arrays of `count` elements, any alignment
  int n = 0;                            // at least 1
  void* out = nullptr;                  // may be exactly one of the inputs; no other overlap
  void* second_out = nullptr;           // also gets the result where not null; same rule
  std::size_t count = 0;
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  const double* factors = nullptr;  // [n], premul_sum only
  int divisor = 1;                  // avg only: the world size
  Store store = Store::cached;      // of `out`
  Store second_store = Store::cached;
};

// out[i] = op(...op(op(inputs[0][i], inputs[1][i]), inputs[2][i])...): in the order of `inputs`,
// 16-bit floats converted to fp32, accumulated there and rounded (to nearest even) once; fp32 and
// fp64 accumulate in their own type. avg divides the sum once, before the rounding. premul_sum
// multiplies in the accumulation type before it adds (no fused multiply-add). The same bits on
// every instruction set, whatever the alignment, and however an array is cut into calls.
void reduce(const ReduceArgs& args);

// memcpy with the hint.
void copy(void* out, const void* in, std::size_t bytes, Store store);

// "avx512", "avx2" or "portable"; PYPARALLEL_SIMD forces one (an error where this CPU lacks it).
const char* simd_name();

}  // namespace pyparallel::shm
