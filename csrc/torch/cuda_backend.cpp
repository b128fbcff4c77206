// Compiled only against a CUDA build of torch, with nothing of CUDA but c10/cuda.
#include "torch/cuda_backend.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "torch/nccl_backend.h"

namespace pyparallel::dist {
namespace {

void* handle(c10::Stream stream) { return c10::cuda::CUDAStream(stream).stream(); }

std::uint64_t capture_id(c10::Stream stream) {
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
#if CUDART_VERSION >= 13000
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(c10::cuda::CUDAStream(stream).stream(), &status, &id));
#else
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo_v2(c10::cuda::CUDAStream(stream).stream(), &status, &id));
#endif
  return status == cudaStreamCaptureStatusNone ? 0 : static_cast<std::uint64_t>(id);
}

constexpr StreamCalls calls{&handle, &capture_id, nullptr};

const bool registered = [] {
  set_cuda_stream_calls(&calls);
  set_cuda_backend_factory([](const Seat& seat) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<NcclBackend>(seat, c10::DeviceType::CUDA, calls);
  });
  return true;
}();

}  // namespace
}  // namespace pyparallel::dist
