#include "torch/tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "base/error.h"

namespace pyparallel::dist {

Element element_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return {DType::f64, 1};
    case at::kFloat:
      return {DType::f32, 1};
    case at::kHalf:
      return {DType::f16, 1};
    case at::kBFloat16:
      return {DType::bf16, 1};
    case at::kChar:
      return {DType::i8, 1};
    case at::kShort:
    case at::kUInt16:
      return {DType::i16, 1};
    case at::kInt:
    case at::kUInt32:
      return {DType::i32, 1};
    case at::kLong:
    case at::kUInt64:
      return {DType::i64, 1};
    case at::kBool:
      return {DType::boolean, 1};
    case at::kComplexHalf:
      return {DType::f16, 2};
    case at::kComplexFloat:
      return {DType::f32, 2};
    case at::kComplexDouble:
      return {DType::f64, 2};
    default:  // uint8, the 8-bit floats and what later versions of torch add: bytes
      return {DType::u8, c10::elementSize(type)};
  }
}

Element reducible_element_of(at::ScalarType type, ReduceOp op) {
  const Element element = element_of(type);
  const bool is_sum = op == ReduceOp::sum || op == ReduceOp::avg || op == ReduceOp::premul_sum;
  const bool wraps_alike = op == ReduceOp::sum || op == ReduceOp::product || op == ReduceOp::band ||
                           op == ReduceOp::bor || op == ReduceOp::bxor;
  bool known = false;
  if (c10::isComplexType(type)) {
    known = is_sum;
  } else if (type == at::kUInt16 || type == at::kUInt32 || type == at::kUInt64) {
    known = wraps_alike;  // these give the same bits as on the signed type
  } else {
    known = element.dtype != DType::u8 || type == at::kByte;
  }
  PYPARALLEL_REQUIRE(known && is_defined(op, element.dtype), "reduction ", name_of(op),
                     " is not defined on ", c10::toString(type),
                     "; cast the tensor first or choose another reduction");
  return element;
}

shm::Reduction reduction_of(const c10d::ReduceOp& op) {
  using Torch = c10d::ReduceOp::RedOpType;
  switch (op.op_) {
    case Torch::SUM:
      return {ReduceOp::sum, 1.0};
    case Torch::AVG:
      return {ReduceOp::avg, 1.0};
    case Torch::PRODUCT:
      return {ReduceOp::product, 1.0};
    case Torch::MIN:
      return {ReduceOp::min, 1.0};
    case Torch::MAX:
      return {ReduceOp::max, 1.0};
    case Torch::BAND:
      return {ReduceOp::band, 1.0};
    case Torch::BOR:
      return {ReduceOp::bor, 1.0};
    case Torch::BXOR:
      return {ReduceOp::bxor, 1.0};
    case Torch::PREMUL_SUM: {
      const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      PYPARALLEL_REQUIRE(factor != nullptr, "premul_sum has no factor: make the reduction with ",
                         "torch.distributed._make_nccl_premul_sum(factor)");
      return {ReduceOp::premul_sum, factor->tensor_factor.defined()
                                        ? factor->tensor_factor.item<double>()
                                        : factor->double_factor};
    }
    default:
      throw InvalidArgument(str("unknown reduction ", static_cast<int>(op.op_),
                                "; known are SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, "
                                "PREMUL_SUM"));
  }
}

void require_dense_cpu(const at::Tensor& tensor, const char* what) {
  PYPARALLEL_REQUIRE(tensor.defined(), what, " is an undefined tensor");
  PYPARALLEL_REQUIRE(tensor.layout() == at::kStrided && !tensor.is_quantized(), what, " is a ",
                     tensor.layout(), tensor.is_quantized() ? " quantized" : "",
                     " tensor; only dense ones can be sent (all_reduce also takes sparse COO)");
  PYPARALLEL_REQUIRE(tensor.device().is_cpu(), what, " is on ", tensor.device().str(),
                     ", the other tensors of the call on cpu");
}

void require_same_type(const at::Tensor& tensor, const at::Tensor& like, const char* what) {
  PYPARALLEL_REQUIRE(tensor.scalar_type() == like.scalar_type(), what, " has dtype ",
                     c10::toString(tensor.scalar_type()), ", the others of the call have ",
                     c10::toString(like.scalar_type()));
}

Dense::Dense(const at::Tensor& tensor, Use use, Element element) : element_(element) {
  // A lazily conjugated or negated tensor's memory does not hold its values.
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
    dense_ = tensor;
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  dense_ = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  if (use != Use::write) dense_.copy_(tensor);
  if (use != Use::read) target_ = tensor;
}

void Dense::avoid(shm::Block written, const void* in_place) {
  const auto* const begin = static_cast<const std::byte*>(data());
  const auto* const other = static_cast<const std::byte*>(written.data);
  const std::size_t size = size_of(element_.dtype);
  if (begin == in_place || begin + count() * size <= other || other + written.count * size <= begin)
    return;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  dense_ = dense_.clone(at::MemoryFormat::Contiguous);
}

void Dense::write_back() {
  if (!target_.defined()) return;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  target_.copy_(dense_);
}

DenseList::DenseList(const std::vector<at::Tensor>& tensors, Dense::Use use, Element element) {
  parts_.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const Dense& part = parts_.emplace_back(tensor, use, element);
    blocks_.push_back(part.block());
    const_blocks_.push_back(part.const_block());
  }
}

void DenseList::write_back() {
  for (Dense& part : parts_) part.write_back();
}

}  // namespace pyparallel::dist
