// The CUDA half's send and receive, and its barrier.
#include "base/error.h"
#include "torch/nccl_calls.h"

namespace pyparallel::dist {

using nccl::Communicator;
using nccl::Stream;

NcclBackend::Work NcclBackend::barrier(const c10d::BarrierOptions& opts) {
  c10::Device device = streams_.current_device();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (device_) device = *device_;
  }
  if (opts.device) device = *opts.device;
  if (!opts.device_ids.empty())
    device = c10::Device(streams_.type(), static_cast<c10::DeviceIndex>(opts.device_ids.front()));
  const at::Tensor token = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(device));
  Call call = all_reduce_call(token, c10d::ReduceOp::SUM);
  call.small_sum.reset();
  call.waits_on_host = true;
  return start({c10d::OpType::BARRIER, "barrier", "pyparallel:barrier"}, how_of(opts), {token},
               std::move(call));
}

NcclBackend::Work NcclBackend::exchange(const Spec& spec, Tensors& tensors, int peer, int tag,
                                        bool sends) {
  const at::Tensor& tensor = the_only(tensors, spec.name);
  require_root(peer, size_);
  PYPARALLEL_REQUIRE(tag == 0, spec.name, " with tag ", tag,
                     ": NCCL matches messages by their order and has no tags; use tag 0");
  const Element element = element_of(tensor.scalar_type());
  auto data = dense(tensor, sends ? Dense::Use::read : Dense::Use::write, element);
  Call call{{data}, {}, {tensors}};
  call.run = [data, element, peer, sends](Communicator& ranks, Stream stream) {
    if (sends)
      ranks.send(data->data(), data->count(), nccl_element(element), peer, stream);
    else
      ranks.recv(data->data(), data->count(), nccl_element(element), peer, stream);
  };
  return start(spec, {}, tensors, std::move(call));
}

NcclBackend::Work NcclBackend::send(Tensors& tensors, int destination, int tag) {
  return exchange({c10d::OpType::SEND, "send", "pyparallel:send"}, tensors, destination, tag, true);
}

NcclBackend::Work NcclBackend::recv(Tensors& tensors, int source, int tag) {
  return exchange({c10d::OpType::RECV, "recv", "pyparallel:recv"}, tensors, source, tag, false);
}

}  // namespace pyparallel::dist
