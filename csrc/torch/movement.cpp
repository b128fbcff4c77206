// Collectives of the backend that move data and compute nothing.
#include "torch/start.h"

namespace pyparallel::dist {
namespace {

void all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, Element element,
                shm::Communicator& communicator, Deadline deadline) {
  Dense from(input, Dense::Use::read, element);
  DenseList to(outputs, Dense::Use::write, element);
  for (int rank = 0; rank < communicator.size(); ++rank) {
    const shm::Block& block = to.blocks()[rank];
    from.avoid(block, rank == communicator.rank() ? block.data : nullptr);
  }
  communicator.all_gather(from.data(), to.blocks(), element.dtype, deadline);
  to.write_back();
}

void all_gather_tensor(const at::Tensor& output, const at::Tensor& input, Element element,
                       shm::Communicator& communicator, Deadline deadline) {
  Dense from(input, Dense::Use::read, element);
  Dense to(output, Dense::Use::write, element);
  const auto blocks = equal_blocks<shm::Block>(to, element, communicator.size());
  from.avoid(to.block(), blocks[static_cast<std::size_t>(communicator.rank())].data);
  communicator.all_gather(from.data(), blocks.data(), element.dtype, deadline);
  to.write_back();
}

void require_gathered(const at::Tensor& whole, const at::Tensor& shard, int size,
                      const char* what) {
  require_dense_cpu(shard, "input");
  require_dense_cpu(whole, "output");
  require_same_type(whole, shard, "output");
  PYPARALLEL_REQUIRE(whole.numel() == shard.numel() * size, what, ": output has ", whole.numel(),
                     " elements, input ", shard.numel(), "; expected output = input x ", size,
                     " ranks. For uneven shards pass a list of tensors.");
}

void require_own_size(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int rank) {
  const at::Tensor& own = outputs[static_cast<std::size_t>(rank)];
  PYPARALLEL_REQUIRE(own.numel() == input.numel(), "output[", rank, "], this rank's own, has ",
                     own.numel(), " elements; expected those of the input: ", input.numel());
}

}  // namespace

Backend::Work Backend::allgather(TensorLists& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& opts) {
  if (auto* device = device_backend(inputs)) return device->allgather(outputs, inputs, opts);
  const Spec spec{c10d::OpType::ALLGATHER, "all_gather", "pyparallel:all_gather"};
  return start(
      spec, opts, inputs, [&] { return outputs; },
      [&] {
        const at::Tensor& input = the_only(inputs, "all_gather input");
        const Tensors& list = the_only(outputs, "all_gather output");
        require_dense_cpu(input, "input");
        require_one_per_rank(list, input, size_, "output");
        require_own_size(list, input, rank_);
        const Element element = element_of(input.scalar_type());
        return [list, input, element](shm::Communicator& communicator, Deadline deadline) {
          all_gather(list, input, element, communicator, deadline);
        };
      });
}

Backend::Work Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                       const c10d::AllgatherOptions& opts) {
  if (auto* device = device_backend(input)) return device->_allgather_base(output, input, opts);
  const Spec spec{c10d::OpType::_ALLGATHER_BASE, "all_gather", "pyparallel:_all_gather_base"};
  return start(
      spec, opts, {input}, [&] { return Outputs{{output}}; },
      [&] {
        require_gathered(output, input, size_, "all_gather_into_tensor");
        const Element element = element_of(input.scalar_type());
        return [output, input, element](shm::Communicator& communicator, Deadline deadline) {
          all_gather_tensor(output, input, element, communicator, deadline);
        };
      });
}

Backend::Work Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& opts) {
  if (auto* device = device_backend(inputs)) {
    return device->allgather_coalesced(outputs, inputs, opts);
  }
  const Spec spec{c10d::OpType::ALLGATHER_COALESCED, "all_gather",
                  "pyparallel:all_gather_coalesced"};
  return start(
      spec, opts, inputs, [&] { return outputs; },
      [&] {
        PYPARALLEL_REQUIRE(outputs.size() == static_cast<std::size_t>(size_), "outputs has ",
                           outputs.size(), " lists; expected one per rank: ", size_);
        TensorLists by_input(inputs.size());  // outputs[rank][i] is rank's inputs[i]
        for (const Tensors& list : outputs) {
          PYPARALLEL_REQUIRE(list.size() == inputs.size(), "an output list has ", list.size(),
                             " tensors; expected one per input: ", inputs.size());
          for (std::size_t i = 0; i < inputs.size(); ++i) by_input[i].push_back(list[i]);
        }
        std::vector<Element> elements;
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          require_dense_cpu(inputs[i], "input");
          require_one_per_rank(by_input[i], inputs[i], size_, "output");
          require_own_size(by_input[i], inputs[i], rank_);
          elements.push_back(element_of(inputs[i].scalar_type()));
        }
        return [by_input, inputs, elements](shm::Communicator& communicator, Deadline deadline) {
          for (std::size_t i = 0; i < inputs.size(); ++i) {
            all_gather(by_input[i], inputs[i], elements[i], communicator, deadline);
          }
        };
      });
}

Backend::Work Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::AllgatherOptions& opts) {
  if (auto* device = device_backend(inputs)) {
    return device->allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  const Spec spec{c10d::OpType::ALLGATHER_COALESCED, "all_gather",
                  "pyparallel:all_gather_into_tensor_coalesced"};
  return start(
      spec, opts, inputs, [&] { return Outputs{outputs}; },
      [&] {
        PYPARALLEL_REQUIRE(outputs.size() == inputs.size(), "all_gather_into_tensor_coalesced has ",
                           inputs.size(), " inputs and ", outputs.size(), " outputs");
        std::vector<Element> elements;
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          require_gathered(outputs[i], inputs[i], size_, "all_gather_into_tensor_coalesced");
          elements.push_back(element_of(inputs[i].scalar_type()));
        }
        return [outputs, inputs, elements](shm::Communicator& communicator, Deadline deadline) {
          for (std::size_t i = 0; i < inputs.size(); ++i) {
            all_gather_tensor(outputs[i], inputs[i], elements[i], communicator, deadline);
          }
        };
      });
}

Backend::Work Backend::gather(TensorLists& outputs, Tensors& inputs,
                              const c10d::GatherOptions& opts) {
  if (auto* device = device_backend(inputs)) return device->gather(outputs, inputs, opts);
  const Spec spec{c10d::OpType::GATHER, "gather", "pyparallel:gather"};
  return start(
      spec, opts, inputs, [&] { return outputs; },
      [&] {
        const at::Tensor& input = the_only(inputs, "gather input");
        require_dense_cpu(input, "input");
        require_root(opts.rootRank, size_);
        const int root = static_cast<int>(opts.rootRank);
        Tensors list;
        if (rank_ == root) {
          list = the_only(outputs, "gather output");
          require_one_per_rank(list, input, size_, "output");
          require_own_size(list, input, rank_);
        } else {
          PYPARALLEL_REQUIRE(outputs.empty(), "outputs are given on rank ", rank_,
                             "; only the root, rank ", root, ", receives");
        }
        const Element element = element_of(input.scalar_type());
        return [list, input, element, root](shm::Communicator& communicator, Deadline deadline) {
          const Dense from(input, Dense::Use::read, element);
          DenseList to(list, Dense::Use::write, element);
          communicator.gather(from.const_block(), to.blocks(), element.dtype, root, deadline);
          to.write_back();
        };
      });
}

Backend::Work Backend::scatter(Tensors& outputs, TensorLists& inputs,
                               const c10d::ScatterOptions& opts) {
  if (auto* device = device_backend(outputs)) return device->scatter(outputs, inputs, opts);
  const Spec spec{c10d::OpType::SCATTER, "scatter", "pyparallel:scatter"};
  return start(
      spec, opts, inputs.empty() ? Tensors() : inputs.front(), [&] { return Outputs{outputs}; },
      [&] {
        const at::Tensor& output = the_only(outputs, "scatter output");
        require_dense_cpu(output, "output");
        require_root(opts.rootRank, size_);
        const int root = static_cast<int>(opts.rootRank);
        Tensors list;
        if (rank_ == root) {
          list = the_only(inputs, "scatter input");
          require_one_per_rank(list, output, size_, "input");
        } else {
          PYPARALLEL_REQUIRE(inputs.empty(), "inputs are given on rank ", rank_,
                             "; only the root, rank ", root, ", sends");
        }
        const Element element = element_of(output.scalar_type());
        return [list, output, element, root](shm::Communicator& communicator, Deadline deadline) {
          const DenseList from(list, Dense::Use::read, element);
          Dense to(output, Dense::Use::write, element);
          communicator.scatter(from.const_blocks(), to.block(), element.dtype, root, deadline);
          to.write_back();
        };
      });
}

Backend::Work Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                     std::vector<std::int64_t>& output_splits,
                                     std::vector<std::int64_t>& input_splits,
                                     const c10d::AllToAllOptions& opts) {
  if (auto* device = device_backend(input)) {
    return device->alltoall_base(output, input, output_splits, input_splits, opts);
  }
  const Spec spec{c10d::OpType::ALLTOALL_BASE, "all_to_all", "pyparallel:all_to_all_single"};
  return start(
      spec, opts, {input}, [&] { return Outputs{{output}}; },
      [&] {
        require_dense_cpu(input, "input");
        require_dense_cpu(output, "output");
        const auto sent = counts_of(input, input_splits, size_, "input");
        const auto received = counts_of(output, output_splits, size_, "output");
        require_same_type(output, input, "output");
        const Element element = element_of(input.scalar_type());
        return [output, input, sent, received, element](shm::Communicator& communicator,
                                                        Deadline deadline) {
          Dense from(input, Dense::Use::read, element);
          Dense to(output, Dense::Use::write, element);
          from.avoid(to.block(), sent == received ? to.data() : nullptr);
          communicator.all_to_all(cut<shm::ConstBlock>(from, sent, element).data(),
                                  cut<shm::Block>(to, received, element).data(), element.dtype,
                                  deadline);
          to.write_back();
        };
      });
}

Backend::Work Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                const c10d::AllToAllOptions& opts) {
  if (auto* device = device_backend(inputs)) return device->alltoall(outputs, inputs, opts);
  const Spec spec{c10d::OpType::ALLTOALL, "all_to_all", "pyparallel:all_to_all"};
  return start(
      spec, opts, inputs, [&] { return Outputs{outputs}; },
      [&] {
        PYPARALLEL_REQUIRE(!inputs.empty(),
                           "all_to_all of no tensors; expected one per rank: ", size_);
        require_one_per_rank(inputs, inputs.front(), size_, "input");
        require_one_per_rank(outputs, inputs.front(), size_, "output");
        const Element element = element_of(inputs.front().scalar_type());
        return [outputs, inputs, element](shm::Communicator& communicator, Deadline deadline) {
          const DenseList from(inputs, Dense::Use::read, element);
          DenseList to(outputs, Dense::Use::write, element);
          communicator.all_to_all(from.const_blocks(), to.blocks(), element.dtype, deadline);
          to.write_back();
        };
      });
}

}  // namespace pyparallel::dist
