// The only place where the backend meets CUDA itself: everything else of the CUDA half speaks to
// torch's device-independent streams and events, and so compiles (and is tested) without CUDA.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>

namespace pyparallel::dist {

// What torch's device-independent interface does not tell of a stream.
struct StreamCalls {
  void* (*handle)(c10::Stream stream);              // cudaStream_t
  std::uint64_t (*capture_id)(c10::Stream stream);  // of the graph being captured; 0: none
  // Returns when what the handle was given is done. Null on devices with events.
  void (*settle)(void* handle);
};

// Null where this build has no CUDA half. Set when cuda_backend.cpp is part of the module.
const StreamCalls* cuda_stream_calls() noexcept;
void set_cuda_stream_calls(const StreamCalls* calls) noexcept;

}  // namespace pyparallel::dist
