#include "torch/many_rows.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstring>
#include <optional>
#include <string>

#include "shm/reduce.h"

namespace pyparallel::dist {
namespace {

constexpr std::int64_t kLeastSide = 8;  // fewer rows, or terms of a sum, are read, not computed
constexpr std::int64_t kLeastWork = 1 << 22;  // multiply-adds; below, calling is what costs

// What torch.compile calls for a linear layer on a CPU.
const std::optional<c10::OperatorHandle>& linear_of_onednn() {
  static const auto found =
      c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  return found;
}

bool is_faster_here() {
#if defined(__x86_64__)
  static const bool found = std::strcmp(shm::simd_name(), "avx512") == 0 &&
                            !__builtin_cpu_is("intel") && linear_of_onednn().has_value();
  return found;
#else
  return false;
#endif
}

bool is_plain(const at::Tensor& x) {
  return x.device().is_cpu() && x.layout() == at::kStrided && x.scalar_type() == at::kFloat &&
         !x.is_neg();
}

}  // namespace

bool is_for_onednn(const at::Tensor& x, const at::Tensor& weight) {
  if (!is_faster_here() || x.dim() < 2 || weight.dim() != 2 || x.size(-1) != weight.size(1)) {
    return false;
  }
  if (!is_plain(x) || !is_plain(weight) || x.numel() == 0) return false;
  const std::int64_t k = x.size(-1), m = x.numel() / k, n = weight.size(0);
  return m >= kLeastSide && k >= kLeastSide && n >= kLeastSide && m * n * k >= kLeastWork;
}

at::Tensor onednn_product(const at::Tensor& x, const at::Tensor& weight) {
  const at::AutoDispatchBelowADInplaceOrView below;
  torch::jit::Stack stack{x,
                          weight,
                          c10::IValue(),
                          std::string("none"),
                          c10::List<std::optional<at::Scalar>>(),
                          c10::IValue()};
  linear_of_onednn()->callBoxed(stack);
  return stack.front().toTensor();
}

}  // namespace pyparallel::dist
