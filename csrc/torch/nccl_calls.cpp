// The collectives of the CUDA half: arguments checked, then handed to start().
#include "torch/nccl_calls.h"

#include "base/error.h"

namespace pyparallel::dist {
namespace {

using nccl::Communicator;
using nccl::Stream;

// A reduction on its way to the library; a factor needs the communicator.
struct Reduced {
  shm::Reduction reduction;
  Element element;

  static Reduced of(const c10d::ReduceOp& op, at::ScalarType type) {
    const shm::Reduction reduction = reduction_of(op);
    const Element element = reducible_element_of(type, reduction.op);
    if (reduction.op != ReduceOp::premul_sum) nccl::red_op_of(reduction.op, nccl_element(element));
    return {reduction, element};
  }
  nccl::Reduction in(Communicator& ranks) const {
    nccl::Reduction made{reduction.op, nullptr};
    if (reduction.op == ReduceOp::premul_sum)
      made.premul_sum =
          nccl::PreMulSum::make(ranks.shared_from_this(), reduction.factor, nccl_element(element));
    return made;
  }
};

template <typename Block>
std::vector<Block> blocks_of(const std::vector<std::shared_ptr<Dense>>& parts) {
  std::vector<Block> blocks;
  for (const auto& part : parts) blocks.push_back({part->data(), part->count()});
  return blocks;
}

void require_whole(const at::Tensor& whole, const at::Tensor& shard, int size, const char* what) {
  require_same_type(whole, shard, what);
  PYPARALLEL_REQUIRE(whole.numel() == shard.numel() * size, what, ": the whole has ", whole.numel(),
                     " elements, a rank's share ", shard.numel(), "; expected the share x ", size,
                     " ranks. For uneven shards pass a list of tensors.");
}

}  // namespace

void NcclBackend::require_here(const at::Tensor& tensor, const char* what) const {
  PYPARALLEL_REQUIRE(tensor.defined(), what, ": an undefined tensor");
  PYPARALLEL_REQUIRE(tensor.layout() == at::kStrided && !tensor.is_quantized(), what, ": a ",
                     tensor.layout(), tensor.is_quantized() ? " quantized" : "",
                     " tensor; only dense ones can be sent");
  PYPARALLEL_REQUIRE(tensor.device().type() == streams_.type(), what, ": a tensor on ",
                     tensor.device().str(), ", the other tensors of the call on ",
                     c10::DeviceTypeName(streams_.type(), true));
}

std::shared_ptr<Dense> NcclBackend::dense(const at::Tensor& tensor, Dense::Use use,
                                          Element element) const {
  require_here(tensor, "tensor");
  const c10::DeviceGuard guard(tensor.device());
  return std::make_shared<Dense>(tensor, use, element);
}

std::vector<std::shared_ptr<Dense>> NcclBackend::dense_list(const Tensors& tensors,
                                                            const at::Tensor& like, Dense::Use use,
                                                            Element element,
                                                            const char* what) const {
  PYPARALLEL_REQUIRE(tensors.size() == static_cast<std::size_t>(size_), what, " has ",
                     tensors.size(), " tensors; expected one per rank: ", size_);
  std::vector<std::shared_ptr<Dense>> parts;
  for (const at::Tensor& tensor : tensors) {
    require_same_type(tensor, like, what);
    parts.push_back(dense(tensor, use, element));
  }
  return parts;
}

NcclBackend::Work NcclBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = the_only(tensors, "broadcast");
  require_root(opts.rootRank, size_);
  const int root = static_cast<int>(opts.rootRank);
  const Element element = element_of(tensor.scalar_type());
  auto data = dense(tensor, rank_ == root ? Dense::Use::read : Dense::Use::write, element);
  Call call{{data}, {}, {tensors}};
  call.run = [data, element, root](Communicator& ranks, Stream stream) {
    ranks.broadcast(data->data(), data->data(), data->count(), nccl_element(element), root, stream);
  };
  return start({c10d::OpType::BROADCAST, "broadcast", "pyparallel:broadcast"}, how_of(opts),
               tensors, std::move(call));
}

NcclBackend::Call NcclBackend::all_reduce_call(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const Reduced how = Reduced::of(op, tensor.scalar_type());
  auto data = dense(tensor, Dense::Use::read_write, how.element);
  Call call{{data}, {}, {{tensor}}};
  const DType dtype = how.element.dtype;
  if (how.reduction.op == ReduceOp::sum &&
      (dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16))
    call.small_sum = dtype;
  call.run = [data, how](Communicator& ranks, Stream stream) {
    ranks.all_reduce(data->data(), data->data(), data->count(), nccl_element(how.element),
                     how.in(ranks), stream);
  };
  return call;
}

NcclBackend::Work NcclBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return start({c10d::OpType::ALLREDUCE, "all_reduce", "pyparallel:all_reduce"}, how_of(opts),
               tensors, all_reduce_call(the_only(tensors, "all_reduce"), opts.reduceOp));
}

NcclBackend::Work NcclBackend::allreduce_coalesced(Tensors& tensors,
                                                   const c10d::AllreduceCoalescedOptions& opts) {
  std::vector<Call> calls;
  for (const at::Tensor& tensor : tensors) calls.push_back(all_reduce_call(tensor, opts.reduceOp));
  return start({c10d::OpType::ALLREDUCE_COALESCED, "all_reduce", "pyparallel:all_reduce_coalesced"},
               how_of(opts), tensors, together(std::move(calls), {tensors}));
}

NcclBackend::Work NcclBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = the_only(tensors, "reduce");
  require_root(opts.rootRank, size_);
  const int root = static_cast<int>(opts.rootRank);
  const Reduced how = Reduced::of(opts.reduceOp, tensor.scalar_type());
  auto data = dense(tensor, rank_ == root ? Dense::Use::read_write : Dense::Use::read, how.element);
  Call call{{data}, {}, {tensors}};
  call.run = [data, how, root](Communicator& ranks, Stream stream) {
    ranks.reduce(data->data(), data->data(), data->count(), nccl_element(how.element),
                 how.in(ranks), root, stream);
  };
  return start({c10d::OpType::REDUCE, "reduce", "pyparallel:reduce"}, how_of(opts), tensors,
               std::move(call));
}

NcclBackend::Work NcclBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = the_only(inputs, "all_gather input");
  const Tensors& list = the_only(outputs, "all_gather output");
  return start({c10d::OpType::ALLGATHER, "all_gather", "pyparallel:all_gather"}, how_of(opts),
               inputs, all_gather_call(list, input));
}

NcclBackend::Call NcclBackend::all_gather_call(const Tensors& list, const at::Tensor& input) {
  const Element element = element_of(input.scalar_type());
  auto from = dense(input, Dense::Use::read, element);
  auto to = dense_list(list, input, Dense::Use::write, element, "output");
  PYPARALLEL_REQUIRE(to[static_cast<std::size_t>(rank_)]->count() == from->count(), "output[",
                     rank_, "], this rank's own, has ",
                     to[static_cast<std::size_t>(rank_)]->count(),
                     " elements; expected those of the input: ", from->count());
  Call call{to, {}, {list}};
  call.dense.push_back(from);
  call.run = [from, to, element](Communicator& ranks, Stream stream) {
    ranks.all_gather(from->data(), blocks_of<nccl::Block>(to), nccl_element(element), stream);
  };
  return call;
}

NcclBackend::Work NcclBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                   const c10d::AllgatherOptions& opts) {
  PYPARALLEL_REQUIRE(outputs.size() == static_cast<std::size_t>(size_),
                     "all_gather_coalesced output has ", outputs.size(),
                     " lists; expected one per rank: ", size_);
  std::vector<Call> calls;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors of_all;
    for (const Tensors& list : outputs) {
      PYPARALLEL_REQUIRE(list.size() == inputs.size(), "all_gather_coalesced has ", inputs.size(),
                         " inputs and a list of ", list.size(), " outputs");
      of_all.push_back(list[i]);
    }
    calls.push_back(all_gather_call(of_all, inputs[i]));
  }
  return start({c10d::OpType::ALLGATHER_COALESCED, "all_gather", "pyparallel:all_gather_coalesced"},
               how_of(opts), inputs, together(std::move(calls), outputs));
}

NcclBackend::Call NcclBackend::all_gather_call(const at::Tensor& output, const at::Tensor& input) {
  require_whole(output, input, size_, "all_gather_into_tensor");
  const Element element = element_of(input.scalar_type());
  auto from = dense(input, Dense::Use::read, element);
  auto to = dense(output, Dense::Use::write, element);
  Call call{{to, from}, {}, {{output}}};
  call.run = [from, to, element](Communicator& ranks, Stream stream) {
    ranks.all_gather(from->data(), to->data(), from->count(), nccl_element(element), stream);
  };
  return call;
}

NcclBackend::Work NcclBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::AllgatherOptions& opts) {
  return start({c10d::OpType::_ALLGATHER_BASE, "all_gather", "pyparallel:_all_gather_base"},
               how_of(opts), {input}, all_gather_call(output, input));
}

NcclBackend::Work NcclBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                               const c10d::AllgatherOptions& opts) {
  PYPARALLEL_REQUIRE(outputs.size() == inputs.size(), "all_gather_into_tensor_coalesced has ",
                     inputs.size(), " inputs and ", outputs.size(), " outputs");
  std::vector<Call> calls;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    calls.push_back(all_gather_call(outputs[i], inputs[i]));
  return start({c10d::OpType::ALLGATHER_COALESCED, "all_gather",
                "pyparallel:all_gather_into_tensor_coalesced"},
               how_of(opts), inputs, together(std::move(calls), {outputs}));
}

NcclBackend::Work NcclBackend::gather(TensorLists& outputs, Tensors& inputs,
                                      const c10d::GatherOptions& opts) {
  const at::Tensor& input = the_only(inputs, "gather input");
  require_root(opts.rootRank, size_);
  const int root = static_cast<int>(opts.rootRank);
  const Element element = element_of(input.scalar_type());
  auto from = dense(input, Dense::Use::read, element);
  std::vector<std::shared_ptr<Dense>> to;
  if (rank_ == root)
    to =
        dense_list(the_only(outputs, "gather output"), input, Dense::Use::write, element, "output");
  Call call{to, {}, outputs};
  call.dense.push_back(from);
  call.run = [from, to, element, root](Communicator& ranks, Stream stream) {
    ranks.gather({from->data(), from->count()}, blocks_of<nccl::Block>(to), nccl_element(element),
                 root, stream);
  };
  return start({c10d::OpType::GATHER, "gather", "pyparallel:gather"}, how_of(opts), inputs,
               std::move(call));
}

NcclBackend::Work NcclBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                       const c10d::ScatterOptions& opts) {
  const at::Tensor& output = the_only(outputs, "scatter output");
  require_root(opts.rootRank, size_);
  const int root = static_cast<int>(opts.rootRank);
  const Element element = element_of(output.scalar_type());
  auto to = dense(output, Dense::Use::write, element);
  std::vector<std::shared_ptr<Dense>> from;
  if (rank_ == root)
    from =
        dense_list(the_only(inputs, "scatter input"), output, Dense::Use::read, element, "input");
  Call call{from, {}, {outputs}};
  call.dense.push_back(to);
  call.run = [from, to, element, root](Communicator& ranks, Stream stream) {
    ranks.scatter(blocks_of<nccl::ConstBlock>(from), {to->data(), to->count()},
                  nccl_element(element), root, stream);
  };
  return start({c10d::OpType::SCATTER, "scatter", "pyparallel:scatter"}, how_of(opts),
               rank_ == root ? inputs.front() : Tensors(), std::move(call));
}

NcclBackend::Work NcclBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                              const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = the_only(outputs, "reduce_scatter output");
  const Tensors& list = the_only(inputs, "reduce_scatter input");
  const Reduced how = Reduced::of(opts.reduceOp, output.scalar_type());
  auto from = dense_list(list, output, Dense::Use::read, how.element, "input");
  auto to = dense(output, Dense::Use::write, how.element);
  const std::size_t own = from[static_cast<std::size_t>(rank_)]->count();
  PYPARALLEL_REQUIRE(to->count() == own, "output has ", to->count(),
                     " elements; expected those of ", "input[", rank_, "], this rank's own: ", own);
  Call call{from, {}, {outputs}};
  call.dense.push_back(to);
  call.run = [from, to, how](Communicator& ranks, Stream stream) {
    ranks.reduce_scatter(blocks_of<nccl::ConstBlock>(from), to->data(), nccl_element(how.element),
                         how.in(ranks), stream);
  };
  return start({c10d::OpType::REDUCE_SCATTER, "reduce_scatter", "pyparallel:reduce_scatter"},
               how_of(opts), list, std::move(call));
}

NcclBackend::Call NcclBackend::reduce_scatter_call(const at::Tensor& output,
                                                   const at::Tensor& input,
                                                   const c10d::ReduceOp& op) {
  require_whole(input, output, size_, "reduce_scatter_tensor");
  const Reduced how = Reduced::of(op, output.scalar_type());
  auto from = dense(input, Dense::Use::read, how.element);
  auto to = dense(output, Dense::Use::write, how.element);
  Call call{{from, to}, {}, {{output}}};
  call.run = [from, to, how](Communicator& ranks, Stream stream) {
    ranks.reduce_scatter(from->data(), to->data(), to->count(), nccl_element(how.element),
                         how.in(ranks), stream);
  };
  return call;
}

NcclBackend::Work NcclBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::ReduceScatterOptions& opts) {
  return start(
      {c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", "pyparallel:_reduce_scatter_base"},
      how_of(opts), {input}, reduce_scatter_call(output, input, opts.reduceOp));
}

NcclBackend::Work NcclBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  PYPARALLEL_REQUIRE(outputs.size() == inputs.size(), "reduce_scatter_tensor_coalesced has ",
                     inputs.size(), " inputs and ", outputs.size(), " outputs");
  std::vector<Call> calls;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    calls.push_back(reduce_scatter_call(outputs[i], inputs[i], opts.reduceOp));
  return start({c10d::OpType::REDUCE_SCATTER, "reduce_scatter",
                "pyparallel:reduce_scatter_tensor_coalesced"},
               how_of(opts), inputs, together(std::move(calls), {outputs}));
}

NcclBackend::Work NcclBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                             std::vector<std::int64_t>& output_splits,
                                             std::vector<std::int64_t>& input_splits,
                                             const c10d::AllToAllOptions& opts) {
  require_same_type(output, input, "output");
  const auto sent = counts_of(input, input_splits, size_, "input");
  const auto received = counts_of(output, output_splits, size_, "output");
  const Element element = element_of(input.scalar_type());
  auto from = dense(input, Dense::Use::read, element);
  auto to = dense(output, Dense::Use::write, element);
  Call call{{from, to}, {}, {{output}}};
  call.run = [from, to, sent, received, element](Communicator& ranks, Stream stream) {
    ranks.all_to_all(cut<nccl::ConstBlock>(*from, sent, element),
                     cut<nccl::Block>(*to, received, element), nccl_element(element), stream);
  };
  return start({c10d::OpType::ALLTOALL_BASE, "all_to_all", "pyparallel:all_to_all_single"},
               how_of(opts), {input}, std::move(call));
}

NcclBackend::Work NcclBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllToAllOptions& opts) {
  PYPARALLEL_REQUIRE(!inputs.empty(), "all_to_all of no tensors; expected one per rank: ", size_);
  const Element element = element_of(inputs.front().scalar_type());
  auto from = dense_list(inputs, inputs.front(), Dense::Use::read, element, "input");
  auto to = dense_list(outputs, inputs.front(), Dense::Use::write, element, "output");
  Call call{from, {}, {outputs}};
  call.dense.insert(call.dense.end(), to.begin(), to.end());
  call.run = [from, to, element](Communicator& ranks, Stream stream) {
    ranks.all_to_all(blocks_of<nccl::ConstBlock>(from), blocks_of<nccl::Block>(to),
                     nccl_element(element), stream);
  };
  return start({c10d::OpType::ALLTOALL, "all_to_all", "pyparallel:all_to_all"}, how_of(opts),
               inputs, std::move(call));
}

NcclBackend::Call NcclBackend::together(std::vector<Call> calls, Outputs outputs) {
  PYPARALLEL_REQUIRE(!calls.empty(), "a coalesced call of no tensors");
  Call whole;
  whole.outputs = std::move(outputs);
  std::vector<std::function<void(Communicator&, Stream)>> runs;
  for (Call& call : calls) {
    whole.dense.insert(whole.dense.end(), call.dense.begin(), call.dense.end());
    runs.push_back(std::move(call.run));
  }
  whole.run = [runs = std::move(runs)](Communicator& ranks, Stream stream) {
    nccl::Group group;
    for (const auto& run : runs) run(ranks, stream);
    group.run();
  };
  return whole;
}

}  // namespace pyparallel::dist
