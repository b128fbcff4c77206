// The kernels of csrc/cuda, compiled for the host: the same source that nvcc compiles.
#include "cuda/kernels.cuh"
#include "emulated_elements.h"
#include "emulated_world.h"

namespace pyparallel::cuda::emulation {
namespace {

Kernel by_dtype(DType dtype, Kernel f32, Kernel f16, Kernel bf16) {
  return dtype == DType::f32 ? f32 : dtype == DType::f16 ? f16 : bf16;
}

}  // namespace

Kernel kernel_of(Op op, DType dtype) {
  switch (op) {
    case Op::barrier:
      return barrier;
    case Op::all_reduce_one_shot:
      return by_dtype(dtype, all_reduce_one_shot<float>, all_reduce_one_shot<Half>,
                      all_reduce_one_shot<BFloat16>);
    case Op::all_reduce_two_shot:
      return by_dtype(dtype, all_reduce_two_shot<float>, all_reduce_two_shot<Half>,
                      all_reduce_two_shot<BFloat16>);
    case Op::all_reduce_multimem:
      return by_dtype(dtype, all_reduce_multimem<float>, all_reduce_multimem<Half>,
                      all_reduce_multimem<BFloat16>);
    case Op::all_gather:
      return by_dtype(dtype, all_gather<float>, all_gather<Half>, all_gather<Half>);
    case Op::reduce_scatter:
      return by_dtype(dtype, reduce_scatter<float>, reduce_scatter<Half>, reduce_scatter<BFloat16>);
    case Op::put_signal:
      return put_signal;
    default:
      return wait_signal;
  }
}

}  // namespace pyparallel::cuda::emulation
