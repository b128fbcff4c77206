// torch.distributed's backend "pyparallel": one object per process group and rank.
//
// The way of a call: its arguments are checked (a failure takes this rank's place in the
// collective, so that every rank raises), turned into a Call, and the Call runs
//   at once on the caller's thread   where torch says that the caller waits (asyncOp == false)
//   on the communicator's worker     otherwise, in order; the returned Work tells of its end
// Tensors on an accelerator go to that device's own backend (device_backend.h).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "base/error.h"
#include "shm/communicator.h"
#include "torch/call_batch.h"
#include "torch/device_backend.h"
#include "torch/finisher.h"
#include "torch/group.h"
#include "torch/tensors.h"
#include "torch/work.h"

namespace pyparallel::dist {

// What a group was made with. Of its own type so that torch can copy it when it splits a group.
struct GroupOptions final : c10d::Backend::Options {
  GroupOptions(const std::string& group, std::chrono::milliseconds group_timeout)
      : Options("pyparallel", group_timeout) {
    group_name = group;
  }
};

class Backend final : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  // Collective over the seat's group; see open_group().
  static c10::intrusive_ptr<c10d::Backend> create(const Seat& seat, const GlooFactory& gloo);
  Backend(Seat seat, GlooFactory gloo, std::shared_ptr<shm::Communicator> communicator);
  ~Backend() override;

  const std::string getBackendName() const override { return "pyparallel"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  // What CPU tensors go through: its calls and those of this backend share one order.
  const std::shared_ptr<shm::Communicator>& communicator() const { return communicator_; }

  // --- collectives (collectives.cpp)
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Work allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  Work reduce_scatter(Tensors& outputs, TensorLists& inputs,
                      const c10d::ReduceScatterOptions& opts) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& opts) override;
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& opts) override;
  Work barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // --- collectives that move data (movement.cpp)
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
  Work alltoall_base(at::Tensor& output, at::Tensor& input,
                     std::vector<std::int64_t>& output_splits,
                     std::vector<std::int64_t>& input_splits,
                     const c10d::AllToAllOptions& opts) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;

  // --- messages
  Work send(Tensors& tensors, int destination, int tag) override;
  Work recv(Tensors& tensors, int source, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;

  // --- grouping. Calls of collectives wait for the end and then run as one; messages start at
  // once.
  void startCoalescing() override;
  Work endCoalescing() override;
  // After something raised between the two: what was begun goes on, as if it had not been batched.
  // `op`, when not empty, is a collective that this rank now cannot make; the others hear `why`.
  void abandon_coalescing(const std::string& op, const std::string& why);

  // --- life
  void setSequenceNumberForGroup() override {}  // every group counts from 0
  std::uint64_t getSequenceNumberForGroup() override { return communicator_->sequence(); }
  void setTimeout(std::chrono::milliseconds timeout);  // overrides where this torch has it
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

 private:
  using Call = std::function<void(shm::Communicator&, Deadline)>;
  struct Spec {
    c10d::OpType type;
    const char* name;   // as the core calls it, for messages
    const char* title;  // for profilers
  };

  // The heart of every collective: prepare() checks and gives the call; see the head of this file.
  template <typename Opts, typename GetOutputs, typename Prepare>
  Work start(const Spec& spec, const Opts& opts, const Tensors& inputs, GetOutputs&& outputs,
             Prepare&& prepare);
  Work enqueue(const Spec& spec, std::chrono::milliseconds timeout, const Tensors& inputs,
               Outputs outputs, Call call);
  Work receive(Tensors& tensors, int source, int tag, const Spec& spec);
  Work track_message(const Spec& spec, const at::Tensor& tensor, Dense data,
                     std::shared_ptr<shm::Work> started);
  void announce_refusal(const std::string& name, const std::string& why);
  [[noreturn]] void refuse(const char* name, const InvalidArgument& error);
  std::chrono::milliseconds timeout_of(std::chrono::milliseconds asked) const {
    return asked.count() < 0 ? communicator_->timeout() : asked;
  }
  // The backend for tensors that are not on the CPU; nullptr for those that are.
  c10d::Backend* device_backend(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().is_cpu()) return nullptr;
    c10d::Backend& device = other_devices_.get(tensor.device());
    if (batch_->is_open()) batch_->enter(device);
    return &device;
  }
  c10d::Backend* device_backend(const Tensors& tensors) {
    return tensors.empty() ? nullptr : device_backend(tensors.front());
  }

  const Seat seat_;
  const GlooFactory gloo_;
  const std::shared_ptr<shm::Communicator> communicator_;
  const c10::intrusive_ptr<GroupOptions> options_;
  DeviceBackends other_devices_;
  const std::shared_ptr<Orphans> orphans_ = std::make_shared<Orphans>();

  const std::shared_ptr<Finisher> finisher_;
  const std::shared_ptr<CallBatch> batch_;
};

}  // namespace pyparallel::dist
