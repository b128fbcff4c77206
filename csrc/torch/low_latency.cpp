#include "torch/low_latency.h"

#include "base/error.h"
#include "cuda/loader.h"

namespace pyparallel::dist {
namespace {

constexpr std::size_t kMostChoices = 4096;  // kept; a training step has some dozens of sizes

}  // namespace

LowLatency::LowLatency(const Seat& seat, const Topology& topology, int device, Deadline deadline)
    : group_(seat.group) {
  if (topology.hosts.size() != 1)
    throw Unsupported(str("group ", group_, " spans ", topology.hosts.size(), " hosts"));
  if (seat.size < 2 || seat.size > cuda::kMaxWorld)
    throw Unsupported(str("group ", group_, " has ", seat.size, " ranks; the kernels serve 2 to ",
                          cuda::kMaxWorld));
  const shm::UniqueId id = host_unique_id(seat, topology, 0, deadline);
  ranks_ = shm::Communicator::join(id, seat.rank, seat.size,
                                   {str(group_, " (low latency)"), seat.timeout});
  if (const std::string why = cuda::Kernels::unavailable(); !why.empty()) {
    ranks_->refuse("low-latency workspace", why);
    throw Unsupported(why);
  }
  kernels_.layout.world = static_cast<std::uint32_t>(seat.size);
  symmetric::Options options;
  options.name = group_;
  options.timeout = seat.timeout;
  options.device = device;
  options.channels = 1;
  memory_ = symmetric::SymmetricMemory::create(*ranks_, kernels_.layout.bytes(), options);
  for (int r = 0; r < seat.size; ++r) kernels_.peers[r] = memory_->data(r);
  kernels_.multicast = memory_->backing()->multicast();
  kernels_.rank = seat.rank;
  status_ =
      at::zeros({static_cast<std::int64_t>(sizeof(cuda::StatusPage))},
                at::TensorOptions().dtype(at::kByte).pinned_memory(at::globalContext().hasCUDA()));
  kernels_.status = static_cast<cuda::StatusPage*>(status_.data_ptr());
}

const cuda::Choice& LowLatency::choice(std::size_t count, DType dtype) {
  const auto key = std::make_pair(count, dtype);
  if (auto found = choices_.find(key); found != choices_.end()) return found->second;
  if (choices_.size() >= kMostChoices) choices_.clear();
  cuda::Problem problem;
  problem.dtype = dtype;
  problem.count = count;
  problem.layout = kernels_.layout;
  problem.multicast = kernels_.multicast != nullptr;
  return choices_.emplace(key, cuda::choose(problem)).first->second;
}

bool LowLatency::all_reduce(void* data, std::size_t count, DType dtype, void* stream,
                            std::chrono::milliseconds timeout) {
  cuda::raise_failure(*kernels_.status, group_);
  const cuda::Choice& chosen = choice(count, dtype);
  if (chosen.candidate.nccl) return false;
  cuda::Request request;
  request.op = chosen.candidate.op;
  request.dtype = dtype;
  request.in = data;
  request.out = data;
  request.count = count;
  request.grid = chosen.grid;
  request.timeout_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(timeout).count());
  cuda::Kernels::get().launch(request, kernels_, stream);
  return true;
}

std::string LowLatency::failure() const { return cuda::describe_failure(*kernels_.status, group_); }

void LowLatency::abort() noexcept {
  cuda::request_abort(*kernels_.status);
  memory_->abort("the group was aborted");
}

}  // namespace pyparallel::dist
