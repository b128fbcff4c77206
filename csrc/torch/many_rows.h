// x @ weight^T in float32 for many rows of x: bound by arithmetic.
#pragma once

#include <ATen/core/Tensor.h>

namespace pyparallel::dist {

// Whether oneDNN is to have it rather than torch's linear, which asks MKL: on CPUs of other makers
// than its own MKL stays with 256-bit vectors, and oneDNN takes AVX-512 where there is some.
bool is_for_onednn(const at::Tensor& x, const at::Tensor& weight);

// Any strides; no autograd. Only where is_for_onednn.
at::Tensor onednn_product(const at::Tensor& x, const at::Tensor& weight);

}  // namespace pyparallel::dist
