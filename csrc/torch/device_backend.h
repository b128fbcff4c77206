// Where tensors go that are not on the CPU: each accelerator has a backend of its own behind the
// group's, made when the first tensor of that device comes.
#pragma once

#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "torch/rendezvous.h"

namespace pyparallel::dist {

// Makes the CUDA backend of a group; set by the CUDA half of this module where it is compiled in.
// Not collective by itself: what it needs from the other ranks it exchanges through seat.store,
// under keys that begin with "cuda/".
using DeviceBackendFactory = c10::intrusive_ptr<c10d::Backend> (*)(const Seat& seat);
void set_cuda_backend_factory(DeviceBackendFactory factory) noexcept;
bool has_cuda_backend() noexcept;

class DeviceBackends {
 public:
  explicit DeviceBackends(Seat seat) : seat_(std::move(seat)) {}
  // Throws Unsupported, saying what would be needed, for devices that this build cannot serve.
  c10d::Backend& get(at::Device device);
  // nullptr while no tensor of the device has come.
  c10::intrusive_ptr<c10d::Backend> made() const;

 private:
  const Seat seat_;
  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> cuda_;
};

}  // namespace pyparallel::dist
