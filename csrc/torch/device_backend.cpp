#include "torch/device_backend.h"

#include <atomic>

#include "base/error.h"

namespace pyparallel::dist {
namespace {
std::atomic<DeviceBackendFactory> cuda_factory{nullptr};
}

void set_cuda_backend_factory(DeviceBackendFactory factory) noexcept { cuda_factory = factory; }
bool has_cuda_backend() noexcept { return cuda_factory.load() != nullptr; }

c10d::Backend& DeviceBackends::get(at::Device device) {
  if (!device.is_cuda()) {
    throw Unsupported(
        str("group ", seat_.group, ": a tensor on ", device.str(),
            "; the backend serves cpu and cuda. Use another backend for this device: ",
            "init_process_group(\"cpu:pyparallel,", c10::DeviceTypeName(device.type(), true),
            ":...\")"));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!cuda_) {
    const DeviceBackendFactory factory = cuda_factory.load();
    if (factory == nullptr) {
      throw Unsupported(
          str("group ", seat_.group, ": a tensor on ", device.str(),
              ", but this build of pyparallel has no CUDA half. It needs a CUDA build ",
              "of torch and the CUDA toolkit's headers when it is compiled; ",
              "`python -m pyparallel doctor` tells what was found"));
    }
    cuda_ = factory(seat_);
  }
  return *cuda_;
}

c10::intrusive_ptr<c10d::Backend> DeviceBackends::made() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return cuda_;
}

}  // namespace pyparallel::dist
