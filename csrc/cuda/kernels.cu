// Instantiates the kernels and launches them.
#include <cuda_runtime.h>

#include "cuda/kernels.cuh"
#include "cuda/kernels.h"

namespace pyparallel::cuda {
namespace {

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

// Asking for a kernel's attributes loads it, which lazy loading would otherwise do at its first
// launch.
int prepare() {
  for (int op = 0; op < static_cast<int>(Op::count_); ++op) {
    for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      cudaFuncAttributes attributes;
      const Kernel kernel = kernel_of(static_cast<Op>(op), dtype);
      const auto* function = reinterpret_cast<const void*>(kernel);
      if (int error = cudaFuncGetAttributes(&attributes, function)) return error;
    }
  }
  return cudaSuccess;
}

const char* error_text(int cuda_error) {
  return cudaGetErrorString(static_cast<cudaError_t>(cuda_error));
}

}  // namespace
}  // namespace pyparallel::cuda

extern "C" const pyparallel::cuda::KernelTable* pyparallel_cuda_kernels() {
  using namespace pyparallel::cuda;
  static const KernelTable table = {
      KernelTable::current_version, sizeof(Call), launch, prepare, current_device, error_text};
  return &table;
}
