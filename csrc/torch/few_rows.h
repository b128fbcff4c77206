// x @ weight^T for few rows of x, as decoding has them: bound by reading the weight once.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace pyparallel::dist {

// x [.., K], weight [N, K], alike in dtype; gives [.., N], as at::linear does. Plain CPU tensors of
// 1 to 16 rows, float32 or bfloat16, take a kernel of ours where torch runs on one thread and the
// CPU has AVX-512 (and its bfloat16 dot products); more rows of float32 may be oneDNN's
// (many_rows.h); everything else is at::linear itself.
// Sums are in float32; bfloat16 dot products take subnormal numbers as zero, as the CPU has them.
at::Tensor product(const at::Tensor& x, const at::Tensor& weight);

// The same of matrices, written into `out`.
void product_into(at::Tensor out, const at::Tensor& x, const at::Tensor& weight);

void register_few_rows(pybind11::module_& m);

}  // namespace pyparallel::dist
