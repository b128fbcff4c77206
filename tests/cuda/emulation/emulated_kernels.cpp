// The kernels of csrc/cuda, compiled for the host: the same source that nvcc compiles.
#include "cuda/kernels.cuh"
#include "emulated_elements.h"
#include "emulated_world.h"

namespace pyparallel::cuda::emulation {

HostKernel host_kernel_of(Op op, DType dtype) { return kernel_of(op, dtype); }

}  // namespace pyparallel::cuda::emulation
