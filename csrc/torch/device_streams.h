// Streams and events of one accelerator through torch's device-independent interface. The CPU
// device has neither: there every launch is waited for at once, and that is how tests run the CUDA
// half.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>

#include "torch/cuda_backend.h"

namespace pyparallel::dist {

class DeviceStreams {
 public:
  DeviceStreams(c10::DeviceType type, const StreamCalls& calls) : type_(type), calls_(calls) {}

  c10::DeviceType type() const { return type_; }
  bool asynchronous() const { return type_ != c10::DeviceType::CPU; }
  c10::Device current_device() const { return impl().getDevice(); }
  c10::Stream current(c10::Device device) const { return impl().getStream(device); }
  // One of torch's pool of high-priority streams.
  c10::Stream another(c10::Device device) const {
    return asynchronous() ? impl().getStreamFromGlobalPool(device, true) : current(device);
  }
  void* handle(c10::Stream stream) const { return calls_.handle(stream); }
  std::uint64_t capture_id(c10::Stream stream) const { return calls_.capture_id(stream); }
  // After a launch: on a device without events it is done when this returns.
  void settle(c10::Stream stream) const {
    if (!asynchronous()) calls_.settle(handle(stream));
  }
  // The tensor's memory is not used again before what `stream` now has to do is done.
  void keep(const at::Tensor& tensor, c10::Stream stream) const {
    if (asynchronous()) impl().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }

 private:
  c10::impl::VirtualGuardImpl impl() const { return c10::impl::VirtualGuardImpl(type_); }
  c10::DeviceType type_;
  StreamCalls calls_;
};

// A point in a stream.
class Mark {
 public:
  Mark(const DeviceStreams& streams, c10::Stream stream) {
    if (!streams.asynchronous()) return;
    event_ = std::make_shared<c10::Event>(streams.type());
    event_->record(stream);
  }
  // What `stream` is given from now on happens after it.
  void before(c10::Stream stream) const {
    if (event_) event_->block(stream);
  }
  bool reached() const { return !event_ || event_->query(); }

 private:
  std::shared_ptr<c10::Event> event_;
};

}  // namespace pyparallel::dist
