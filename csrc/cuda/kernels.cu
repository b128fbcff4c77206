// Instantiates the kernels and launches them.
#include <cuda_runtime.h>

#include "cuda/kernels.cuh"
#include "cuda/kernels.h"

namespace pyparallel::cuda {
namespace {

using Kernel = void (*)(Call);

Kernel by_dtype(DType dtype, Kernel f32, Kernel f16, Kernel bf16) {
  return dtype == DType::f32 ? f32 : dtype == DType::f16 ? f16 : bf16;
}

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
    case Op::wait_signal:
      return wait_signal;
    default:
      return nullptr;
  }
}

int current_device(Device* device) {
  int major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device->index);
  const auto read = [&](int* value, cudaDeviceAttr what) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, what, device->index);
  };
  read(&major, cudaDevAttrComputeCapabilityMajor);
  read(&minor, cudaDevAttrComputeCapabilityMinor);
  read(&device->multiprocessors, cudaDevAttrMultiProcessorCount);
  device->capability = major * 10 + minor;
  return error;
}

int launch(const Call& call, DType dtype, Grid grid, void* stream) {
  const Op op = static_cast<Op>(call.op);
  const Kernel kernel = kernel_of(op, dtype);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  if (op == Op::all_reduce_multimem) {
    Device device;
    if (int error = current_device(&device)) return error;
    if (device.capability < 90) return cudaErrorNotSupported;
  }
  void* arguments[] = {const_cast<Call*>(&call)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(grid.blocks),
                          dim3(grid.threads), arguments, 0, static_cast<cudaStream_t>(stream));
}

const char* error_text(int cuda_error) {
  return cudaGetErrorString(static_cast<cudaError_t>(cuda_error));
}

}  // namespace
}  // namespace pyparallel::cuda

extern "C" const pyparallel::cuda::KernelTable* pyparallel_cuda_kernels() {
  using namespace pyparallel::cuda;
  static const KernelTable table = {KernelTable::current_version, sizeof(Call), launch,
                                    current_device, error_text};
  return &table;
}
