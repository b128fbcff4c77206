// Between torch's tensors and the core's arrays: element types, reductions, and dense memory for
// tensors of any layout.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "shm/communicator.h"

namespace pyparallel::dist {

// Element type for moving data: torch types the core does not know travel as ones of the same size
// (complex64 as two f32). `parts` core elements make one element of the tensor.
struct Element {
  DType dtype = DType::u8;
  std::size_t parts = 1;
};
Element element_of(at::ScalarType type);

// Element type for arithmetic; complex numbers are pairs, which is right for sums and averages
// only. Throws InvalidArgument naming the type and the reduction where that makes no sense.
Element reducible_element_of(at::ScalarType type, ReduceOp op);

shm::Reduction reduction_of(const c10d::ReduceOp& op);

// Throws InvalidArgument unless the tensor is a dense (not sparse, quantized, meta) CPU tensor.
void require_dense_cpu(const at::Tensor& tensor, const char* what);
void require_same_type(const at::Tensor& tensor, const at::Tensor& like, const char* what);

// Contiguous memory that stands for a tensor during one call. It is the tensor's own memory
// wherever that is contiguous; else a copy, which write_back() puts into the tensor.
class Dense {
 public:
  enum class Use { read, write, read_write };
  Dense(const at::Tensor& tensor, Use use, Element element);

  void* data() const { return dense_.data_ptr(); }
  std::size_t count() const { return static_cast<std::size_t>(dense_.numel()) * element_.parts; }
  shm::Block block() const { return {data(), count()}; }
  shm::ConstBlock const_block() const { return {data(), count()}; }
  const at::Tensor& tensor() const { return dense_; }
  // Of what is read: becomes a copy where it overlaps what the call writes, unless it begins at
  // `in_place`, where the core allows that.
  void avoid(shm::Block written, const void* in_place);
  void write_back();

 private:
  at::Tensor target_;  // undefined where dense_ is the tensor itself
  at::Tensor dense_;
  Element element_;
};

// One Dense per rank, and the array of blocks that the core takes.
class DenseList {
 public:
  DenseList(const std::vector<at::Tensor>& tensors, Dense::Use use, Element element);
  const shm::Block* blocks() const { return blocks_.data(); }
  const shm::ConstBlock* const_blocks() const { return const_blocks_.data(); }
  void write_back();

 private:
  c10::SmallVector<Dense, 8> parts_;
  c10::SmallVector<shm::Block, 8> blocks_;
  c10::SmallVector<shm::ConstBlock, 8> const_blocks_;
};

}  // namespace pyparallel::dist
