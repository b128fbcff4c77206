// Which products take a kernel (few_rows_avx512.cpp), which oneDNN, and which torch's linear.
#include "torch/few_rows.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "shm/reduce.h"
#include "torch/few_rows_kernels.h"
#include "torch/many_rows.h"

namespace pyparallel::dist {
namespace {

#if defined(__x86_64__)
constexpr std::int64_t kMostRows = 16;
constexpr std::int64_t kLeastWeight = 1 << 12;  // elements; below, calling is what costs

bool has_f32() {
  static const bool found = std::strcmp(shm::simd_name(), "avx512") == 0;
  return found;
}

bool has_bf16() {
  static const bool found = has_f32() && __builtin_cpu_supports("avx512bf16") != 0;
  return found;
}

bool has_kernel(at::ScalarType dtype) {
  return dtype == at::kFloat ? has_f32() : dtype == at::kBFloat16 && has_bf16();
}

bool is_plain(const at::Tensor& x) {
  return x.device().is_cpu() && x.layout() == at::kStrided && x.is_contiguous() && !x.is_neg();
}

at::Tensor few_rows(const at::Tensor& x, const at::Tensor& weight, const FewRows& s) {
  RECORD_FUNCTION("pyparallel::kernels::few_rows", c10::ArrayRef<const c10::IValue>());
  c10::DimVector shape(x.sizes().begin(), x.sizes().end());
  shape.back() = s.n;
  at::Tensor y = at::empty(shape, x.options());
  if (x.scalar_type() == at::kFloat) {
    product_f32(x.const_data_ptr<float>(), weight.const_data_ptr<float>(),
                y.mutable_data_ptr<float>(), s);
  } else {
    product_bf16(static_cast<const std::uint16_t*>(x.const_data_ptr()),
                 static_cast<const std::uint16_t*>(weight.const_data_ptr()),
                 static_cast<std::uint16_t*>(y.mutable_data_ptr()), s);
  }
  return y;
}
#endif

}  // namespace

at::Tensor product(const at::Tensor& x, const at::Tensor& weight) {
#if defined(__x86_64__)
  const bool fits = x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1) &&
                    x.scalar_type() == weight.scalar_type() && is_plain(x) && is_plain(weight);
  if (fits && weight.numel() >= kLeastWeight && at::get_num_threads() == 1) {
    const FewRows s{x.numel() / x.size(-1), weight.size(0), weight.size(1)};
    if (s.m >= 1 && s.m <= kMostRows && has_kernel(x.scalar_type())) return few_rows(x, weight, s);
  }
#endif
  return is_for_onednn(x, weight) ? onednn_product(x, weight) : at::linear(x, weight);
}

void product_into(at::Tensor out, const at::Tensor& x, const at::Tensor& weight) {
  if (is_for_onednn(x, weight)) {
    out.copy_(onednn_product(x, weight));
  } else {
    at::mm_out(out, x, weight.t());
  }
}

void register_few_rows(pybind11::module_& m) {
  m.def("product", &product, pybind11::arg("x"), pybind11::arg("weight"),
        pybind11::call_guard<pybind11::gil_scoped_release>(),
        "x @ weight^T without autograd: torch's linear, but for few rows a kernel of ours, and for "
        "many in float32 oneDNN where that is faster.");
  m.def("product_into", &product_into, pybind11::arg("out"), pybind11::arg("x"),
        pybind11::arg("weight"), pybind11::call_guard<pybind11::gil_scoped_release>(),
        "x @ weight^T of matrices, into `out`.");
}

}  // namespace pyparallel::dist
