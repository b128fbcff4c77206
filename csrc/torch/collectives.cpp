// Reductions, broadcast and barriers of the backend.
#include "torch/sparse.h"
#include "torch/start.h"

namespace pyparallel::dist {
namespace {

// Below this many bytes in all, tensors of a coalesced reduction are packed into one.
constexpr std::size_t packed_bytes = std::size_t{256} << 10;

// torch 2.9 has no name of its own for it.
template <typename Type = c10d::OpType>
constexpr Type reduce_scatter_tensors() {
  if constexpr (requires { Type::REDUCE_SCATTER_TENSOR_COALESCED; }) {
    return Type::REDUCE_SCATTER_TENSOR_COALESCED;
  } else {
    return Type::COALESCED;
  }
}

struct Reduced {
  shm::Reduction reduction;
  Element element;
};

Reduced reduced(const c10d::ReduceOp& op, at::ScalarType type) {
  const shm::Reduction reduction = reduction_of(op);
  return {reduction, reducible_element_of(type, reduction.op)};
}

std::size_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::size_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

void all_reduce(const at::Tensor& tensor, const Reduced& how, shm::Communicator& communicator,
                Deadline deadline) {
  Dense data(tensor, Dense::Use::read_write, how.element);
  communicator.all_reduce(data.data(), data.data(), data.count(), how.element.dtype, how.reduction,
                          deadline);
  data.write_back();
}

void all_reduce_packed(const std::vector<at::Tensor>& tensors, const Reduced& how,
                       shm::Communicator& communicator, Deadline deadline) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  const at::Tensor packed = at::cat(flat);
  all_reduce(packed, how, communicator, deadline);
  std::int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    tensor.copy_(packed.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

void reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input, const Reduced& how,
                           shm::Communicator& communicator, Deadline deadline) {
  Dense from(input, Dense::Use::read, how.element);
  Dense to(output, Dense::Use::write, how.element);
  // In place: the output is this rank's own shard of the input.
  const std::size_t before =
      to.count() * size_of(how.element.dtype) * static_cast<std::size_t>(communicator.rank());
  const bool own = static_cast<std::byte*>(from.data()) + before == to.data();
  from.avoid(to.block(), own ? from.data() : nullptr);
  const auto blocks = equal_blocks<shm::ConstBlock>(from, how.element, communicator.size());
  communicator.reduce_scatter(blocks.data(), to.data(), how.element.dtype, how.reduction, deadline);
  to.write_back();
}

void require_shards(const at::Tensor& whole, const at::Tensor& shard, int size, const char* what) {
  require_dense_cpu(whole, "input");
  require_dense_cpu(shard, "output");
  require_same_type(shard, whole, "output");
  PYPARALLEL_REQUIRE(whole.numel() == shard.numel() * size, what, ": input has ", whole.numel(),
                     " elements, output ", shard.numel(), "; expected input = output x ", size,
                     " ranks. For uneven shards pass lists of tensors.");
}

}  // namespace

Backend::Work Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  if (auto* device = device_backend(tensors)) return device->broadcast(tensors, opts);
  const Spec spec{c10d::OpType::BROADCAST, "broadcast", "pyparallel:broadcast"};
  return start(
      spec, opts, tensors, [&] { return Outputs{tensors}; },
      [&] {
        const at::Tensor& tensor = the_only(tensors, "broadcast");
        require_dense_cpu(tensor, "the tensor");
        require_root(opts.rootRank, size_);
        const int root = static_cast<int>(opts.rootRank);
        const Element element = element_of(tensor.scalar_type());
        return [tensor, root, element](shm::Communicator& communicator, Deadline deadline) {
          const bool sends = communicator.rank() == root;
          Dense data(tensor, sends ? Dense::Use::read : Dense::Use::write, element);
          communicator.broadcast(data.data(), data.count(), element.dtype, root, deadline);
          data.write_back();
        };
      });
}

Backend::Work Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (auto* device = device_backend(tensors)) return device->allreduce(tensors, opts);
  if (tensors.size() == 1 && tensors.front().is_sparse()) return allreduce_sparse(tensors, opts);
  const Spec spec{c10d::OpType::ALLREDUCE, "all_reduce", "pyparallel:all_reduce"};
  return start(
      spec, opts, tensors, [&] { return Outputs{tensors}; },
      [&] {
        const at::Tensor& tensor = the_only(tensors, "all_reduce");
        require_dense_cpu(tensor, "the tensor");
        const Reduced how = reduced(opts.reduceOp, tensor.scalar_type());
        return [tensor, how](shm::Communicator& communicator, Deadline deadline) {
          all_reduce(tensor, how, communicator, deadline);
        };
      });
}

Backend::Work Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const Spec spec{c10d::OpType::_ALLREDUCE_SPARSE, "all_reduce", "pyparallel:sparse_all_reduce"};
  return start(
      spec, opts, tensors, [&] { return Outputs{tensors}; },
      [&] {
        const at::Tensor& tensor = the_only(tensors, "all_reduce");
        const Reduced how = reduced(opts.reduceOp, tensor.scalar_type());
        require_sparse_sum(tensor, how.reduction.op);
        return [tensor, how](shm::Communicator& communicator, Deadline deadline) {
          sparse_all_reduce(tensor, how.reduction.op, communicator, deadline);
        };
      });
}

Backend::Work Backend::allreduce_coalesced(Tensors& tensors,
                                           const c10d::AllreduceCoalescedOptions& opts) {
  if (auto* device = device_backend(tensors)) return device->allreduce_coalesced(tensors, opts);
  const Spec spec{c10d::OpType::ALLREDUCE_COALESCED, "all_reduce",
                  "pyparallel:all_reduce_coalesced"};
  return start(
      spec, opts, tensors, [&] { return Outputs{tensors}; },
      [&] {
        PYPARALLEL_REQUIRE(!tensors.empty(), "all_reduce_coalesced of no tensors");
        for (const at::Tensor& tensor : tensors) {
          require_dense_cpu(tensor, "a tensor");
          require_same_type(tensor, tensors.front(), "a tensor");
        }
        const Reduced how = reduced(opts.reduceOp, tensors.front().scalar_type());
        return [tensors, how](shm::Communicator& communicator, Deadline deadline) {
          if (tensors.size() > 1 && bytes_of(tensors) <= packed_bytes) {
            all_reduce_packed(tensors, how, communicator, deadline);
            return;
          }
          for (const at::Tensor& tensor : tensors) all_reduce(tensor, how, communicator, deadline);
        };
      });
}

Backend::Work Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  if (auto* device = device_backend(tensors)) return device->reduce(tensors, opts);
  const Spec spec{c10d::OpType::REDUCE, "reduce", "pyparallel:reduce"};
  return start(
      spec, opts, tensors, [&] { return Outputs{tensors}; },
      [&] {
        const at::Tensor& tensor = the_only(tensors, "reduce");
        require_dense_cpu(tensor, "the tensor");
        require_root(opts.rootRank, size_);
        const int root = static_cast<int>(opts.rootRank);
        const Reduced how = reduced(opts.reduceOp, tensor.scalar_type());
        return [tensor, how, root](shm::Communicator& communicator, Deadline deadline) {
          const bool receives = communicator.rank() == root;
          Dense data(tensor, receives ? Dense::Use::read_write : Dense::Use::read, how.element);
          communicator.reduce(data.data(), data.data(), data.count(), how.element.dtype,
                              how.reduction, root, deadline);
          data.write_back();
        };
      });
}

Backend::Work Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                      const c10d::ReduceScatterOptions& opts) {
  if (auto* device = device_backend(outputs)) return device->reduce_scatter(outputs, inputs, opts);
  const Spec spec{c10d::OpType::REDUCE_SCATTER, "reduce_scatter", "pyparallel:reduce_scatter"};
  return start(
      spec, opts, inputs.empty() ? Tensors() : inputs.front(), [&] { return Outputs{outputs}; },
      [&] {
        const at::Tensor& output = the_only(outputs, "reduce_scatter output");
        const Tensors& list = the_only(inputs, "reduce_scatter input");
        require_dense_cpu(output, "output");
        require_one_per_rank(list, output, size_, "input");
        PYPARALLEL_REQUIRE(list[static_cast<std::size_t>(rank_)].numel() == output.numel(),
                           "output has ", output.numel(), " elements; expected those of input[",
                           rank_, "]: ", list[static_cast<std::size_t>(rank_)].numel());
        const Reduced how = reduced(opts.reduceOp, output.scalar_type());
        return [output, list, how](shm::Communicator& communicator, Deadline deadline) {
          const DenseList from(list, Dense::Use::read, how.element);
          Dense to(output, Dense::Use::write, how.element);
          communicator.reduce_scatter(from.const_blocks(), to.data(), how.element.dtype,
                                      how.reduction, deadline);
          to.write_back();
        };
      });
}

Backend::Work Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                            const c10d::ReduceScatterOptions& opts) {
  if (auto* device = device_backend(input)) {
    return device->_reduce_scatter_base(output, input, opts);
  }
  const Spec spec{c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter",
                  "pyparallel:_reduce_scatter_base"};
  return start(
      spec, opts, {input}, [&] { return Outputs{{output}}; },
      [&] {
        require_shards(input, output, size_, "reduce_scatter_tensor");
        const Reduced how = reduced(opts.reduceOp, input.scalar_type());
        return [output, input, how](shm::Communicator& communicator, Deadline deadline) {
          reduce_scatter_tensor(output, input, how, communicator, deadline);
        };
      });
}

Backend::Work Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::ReduceScatterOptions& opts) {
  if (auto* device = device_backend(inputs)) {
    return device->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  const Spec spec{reduce_scatter_tensors(), "reduce_scatter",
                  "pyparallel:reduce_scatter_tensor_coalesced"};
  return start(
      spec, opts, inputs, [&] { return Outputs{outputs}; },
      [&] {
        PYPARALLEL_REQUIRE(outputs.size() == inputs.size(), "reduce_scatter_tensor_coalesced has ",
                           inputs.size(), " inputs and ", outputs.size(), " outputs");
        std::vector<Reduced> how;
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          require_shards(inputs[i], outputs[i], size_, "reduce_scatter_tensor_coalesced");
          how.push_back(reduced(opts.reduceOp, inputs[i].scalar_type()));
        }
        return [outputs, inputs, how](shm::Communicator& communicator, Deadline deadline) {
          for (std::size_t i = 0; i < inputs.size(); ++i) {
            reduce_scatter_tensor(outputs[i], inputs[i], how[i], communicator, deadline);
          }
        };
      });
}

Backend::Work Backend::barrier(const c10d::BarrierOptions& opts) {
  if constexpr (requires { opts.device; }) {
    if (opts.device && !opts.device->is_cpu()) {
      return other_devices_.get(*opts.device).barrier(opts);
    }
  }
  const Spec spec{c10d::OpType::BARRIER, "barrier", "pyparallel:barrier"};
  return start(
      spec, opts, {}, [] { return Outputs{}; },
      [] {
        return [](shm::Communicator& communicator, Deadline deadline) {
          communicator.barrier(deadline);
        };
      });
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  // Every barrier here names all ranks that have not come, on every rank.
  communicator_->barrier(Deadline::after(timeout_of(opts.timeout)));
}

}  // namespace pyparallel::dist
