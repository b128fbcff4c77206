// The CUDA driver, found at run time: libcuda.so.1 by the loader, never linked. A machine without
// it runs everything else.
#pragma once

#include <string>

#include "symmetric/cuda_abi.h"

namespace pyparallel::symmetric::cuda {

class Driver {
 public:
  // Loads and initialises once per process. Throws Unsupported with the loader's own words, the
  // missing symbols, or why there is no device.
  static const Driver& get();
  // Empty when get() works, else its message.
  static std::string unavailable();

#define PYPARALLEL_MEMBER(name, feature, parameters) Result(*name) parameters = nullptr;
  PYPARALLEL_CUDA_DRIVER_SYMBOLS(PYPARALLEL_MEMBER)
#undef PYPARALLEL_MEMBER

  // Each feature's missing symbols, empty where it is whole.
  std::string vmm_missing, multicast_missing, ipc_missing;
  int version = 0;  // 12040 = 12.4
  int device_count = 0;

  // "cuMemCreate(...): CUDA_ERROR_OUT_OF_MEMORY: out of memory", with likely causes where known.
  std::string error_text(const std::string& call, Result result) const;
  int attribute(int which, Device device) const;

 private:
  Driver();
};

// Throws CudaError where the call fails.
void check(Result result, const char* call);

// Makes a device's primary context current for its lifetime.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  Device device() const { return device_; }

 private:
  Device device_ = 0;
};

}  // namespace pyparallel::symmetric::cuda

// PYPARALLEL_CUDA(cuMemMap(at, ...)): calls it on the driver, throws CudaError where it fails.
#define PYPARALLEL_CUDA(call) \
  ::pyparallel::symmetric::cuda::check(::pyparallel::symmetric::cuda::Driver::get().call, #call)
