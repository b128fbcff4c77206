// The CUDA half of torch.distributed's backend "pyparallel": collectives of one group over NCCL,
// and small all-reduces over the low-latency kernels (low_latency.h).
//
// The way of a call: its tensors are made dense, the call is put
//   on the caller's stream   where torch says that the caller waits (asyncOp == false)
//   on the group's stream    otherwise, ordered after what the caller's stream has to do;
//   Work::wait
//                            orders the caller's stream after it
// and what was dense in place of a strided tensor is copied back behind it, on the same stream.
// Calls of one group are ordered among themselves by events, whatever streams they are on; inside a
// CUDA graph only with the calls of the same graph.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "nccl/communicator.h"
#include "nccl/group.h"
#include "torch/device_backend.h"
#include "torch/device_streams.h"
#include "torch/low_latency.h"
#include "torch/roll_call.h"
#include "torch/tensors.h"
#include "torch/work.h"

namespace pyparallel::dist {

class NcclBackend final : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  // Collective over the seat's group: ranks meet through its store, under keys of their own. The
  // NCCL communicator is made by the first call, on the device of its tensors.
  NcclBackend(const Seat& seat, c10::DeviceType type, const StreamCalls& calls);
  ~NcclBackend() override;

  const std::string getBackendName() const override { return "pyparallel"; }
  bool supportsCoalescing() const override { return true; }

  // --- collectives (nccl_calls.cpp; from barrier() on nccl_messages.cpp)
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  Work allgather(TensorLists& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& opts) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& opts) override;
  Work allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& opts) override;
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& opts) override;
  Work gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  Work scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  Work reduce_scatter(Tensors& outputs, TensorLists& inputs,
                      const c10d::ReduceScatterOptions& opts) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& opts) override;
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& opts) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input,
                     std::vector<std::int64_t>& output_splits,
                     std::vector<std::int64_t>& input_splits,
                     const c10d::AllToAllOptions& opts) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  Work barrier(const c10d::BarrierOptions& opts) override;
  Work send(Tensors& tensors, int destination, int tag) override;
  Work recv(Tensors& tensors, int source, int tag) override;

  // --- grouping: the calls between become one launch
  void startCoalescing() override;
  Work endCoalescing() override;

  // --- life
  void setTimeout(std::chrono::milliseconds timeout);  // overrides where this torch has it
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Why calls go to NCCL only; empty where small all-reduces have kernels, or no call came yet.
  std::string low_latency_notes() const;

 private:
  struct Spec {
    c10d::OpType type;
    const char* name;
    const char* title;  // for profilers
  };
  // A checked call: its dense memory, what to launch on it, and what torch gets as its result.
  struct Call {
    std::vector<std::shared_ptr<Dense>> dense = {};
    std::function<void(nccl::Communicator&, nccl::Stream)> run = {};
    Outputs outputs = {};
    bool waits_on_host = false;
    std::chrono::milliseconds timeout = {};  // of this call; start() fills it in
    // A sum that the low-latency kernels may take: in place on dense.front().
    std::optional<DType> small_sum = std::nullopt;
  };
  struct Batch {
    std::unique_ptr<nccl::Group> group;
    std::vector<Call> calls;
    std::vector<at::Tensor> inputs;
    std::optional<c10::Device> device;
    std::chrono::milliseconds timeout = {};  // the longest of its calls'
  };
  // How torch wants a call made.
  struct How {
    bool caller_waits = false;
    std::chrono::milliseconds timeout = c10d::kUnsetTimeout;  // the group's
  };
  template <typename Opts>
  static How how_of(const Opts& opts);

  Work start(const Spec& spec, How how, const Tensors& inputs, Call call);
  void put(const Spec& spec, Call& call, c10::Device device, c10::Stream stream);
  void finish(Call& call, c10::Stream caller, c10::Stream stream);
  Work work_of(const Spec& spec, const Tensors& inputs, Call& call, c10::Device device,
               c10::Stream stream);
  c10::Stream stream_for(bool caller_waits, c10::Device device);
  void order_after_last(c10::Stream stream);
  nccl::Communicator& communicator(c10::Device device, const std::string& what,
                                   std::chrono::milliseconds timeout);
  c10::Device device_of(const Tensors& tensors, const char* what) const;
  std::string where(const char* name) const;

  // --- arguments checked (nccl_calls.cpp)
  Call all_reduce_call(const at::Tensor& tensor, const c10d::ReduceOp& op);
  Call all_gather_call(const at::Tensor& output, const at::Tensor& input);
  Call all_gather_call(const Tensors& outputs, const at::Tensor& input);
  Call reduce_scatter_call(const at::Tensor& output, const at::Tensor& input,
                           const c10d::ReduceOp& op);
  static Call together(std::vector<Call> calls, Outputs outputs);
  Work exchange(const Spec& spec, Tensors& tensors, int peer, int tag, bool sends);
  void require_here(const at::Tensor& tensor, const char* what) const;
  std::shared_ptr<Dense> dense(const at::Tensor& tensor, Dense::Use use, Element element) const;
  std::vector<std::shared_ptr<Dense>> dense_list(const Tensors& tensors, const at::Tensor& like,
                                                 Dense::Use use, Element element,
                                                 const char* what) const;

  // What ends a group, to be had while a call is stuck inside the library.
  struct Ends {
    std::shared_ptr<nccl::Communicator> ranks;
    std::shared_ptr<LowLatency> kernels;
    std::shared_ptr<RollCall> roll;
    std::string failure() const;
    void abort(const std::string& why) const;
  };
  Ends ends() const;

  const Seat seat_;
  std::atomic<std::chrono::milliseconds> timeout_;
  const DeviceStreams streams_;
  const Topology topology_;
  mutable std::mutex mutex_;           // one call at a time is being launched
  mutable std::mutex ends_mutex_;      // guards ends_; taken after mutex_
  Ends ends_;                          // written with both
  std::optional<c10::Device> device_;  // the communicator's
  std::optional<c10::Stream> own_stream_;
  std::string low_latency_notes_;
  std::optional<Batch> batch_;
  std::uint64_t sequence_ = 0;
  struct Last {
    Mark end;
    c10::Stream stream;
    std::uint64_t capture;
  };
  std::optional<Last> last_;
};

}  // namespace pyparallel::dist
