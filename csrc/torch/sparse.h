// All-reduce of sparse COO tensors.
#pragma once

#include <ATen/ATen.h>

#include "shm/communicator.h"

namespace pyparallel::dist {

// Throws InvalidArgument unless the tensor is a sparse COO one on the CPU and the reduction a sum
// or an average.
void require_sparse_sum(const at::Tensor& tensor, ReduceOp op);

// Indices are joined, values added in rank order (16-bit floats in fp32, rounded once); the tensor
// becomes the coalesced result, the same bits on every rank. Shapes must agree: else every rank
// throws Mismatch.
void sparse_all_reduce(const at::Tensor& tensor, ReduceOp op, shm::Communicator& communicator,
                       Deadline deadline);

}  // namespace pyparallel::dist
