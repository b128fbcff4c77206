// The arguments of the fast calls (fast_calls.h): what is a plain tensor, and what is another case.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <optional>

#include "python/fast_methods.h"
#include "shm/communicator.h"

namespace pyparallel::dist {

using python::WithoutGil;
using shm::Block;
using shm::ConstBlock;

inline std::optional<DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return DType::f64;
    case at::kFloat:
      return DType::f32;
    case at::kHalf:
      return DType::f16;
    case at::kBFloat16:
      return DType::bf16;
    case at::kChar:
      return DType::i8;
    case at::kShort:
      return DType::i16;
    case at::kInt:
      return DType::i32;
    case at::kLong:
      return DType::i64;
    case at::kByte:
      return DType::u8;
    case at::kBool:
      return DType::boolean;
    default:
      return std::nullopt;
  }
}

// By name, as in pyparallel/comm/reductions.py. Empty for others, and where it is not defined.
inline std::optional<shm::Reduction> reduction_of(PyObject* name, DType dtype) {
  if (!PyUnicode_CheckExact(name)) return std::nullopt;
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name, &length);
  if (text == nullptr) throw pybind11::error_already_set();
  for (int code = 0; code < static_cast<int>(ReduceOp::count_); ++code) {
    const auto op = static_cast<ReduceOp>(code);
    if (op == ReduceOp::premul_sum || std::strcmp(name_of(op), text) != 0) continue;
    if (!is_defined(op, dtype)) return std::nullopt;
    return shm::Reduction{op};
  }
  return std::nullopt;
}

// A tensor whose memory the core may take as it lies. Valid while the argument lives.
class Plain {
 public:
  explicit Plain(PyObject* object) {
    if (!THPVariable_CheckExact(object)) return;
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (!tensor.defined() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided ||
        tensor.requires_grad() || !tensor.is_contiguous() || tensor.is_neg())
      return;
    dtype_ = dtype_of(tensor.scalar_type());
    if (dtype_) tensor_ = &tensor;
  }
  explicit operator bool() const { return tensor_ != nullptr; }

  const at::Tensor& tensor() const { return *tensor_; }
  DType dtype() const { return *dtype_; }
  std::byte* data() const { return static_cast<std::byte*>(tensor_->data_ptr()); }
  std::size_t count() const { return static_cast<std::size_t>(tensor_->numel()); }
  std::size_t bytes() const { return count() * size_of(*dtype_); }

  // The same memory, or no common byte.
  bool disjoint(const Plain& other) const {
    if (data() == other.data()) return bytes() == other.bytes();
    return data() + bytes() <= other.data() || other.data() + other.bytes() <= data();
  }
  // `factor` shards like this one, joined along dimension 0, make a whole like `other`.
  bool is_shard_of(const Plain& other, int factor) const {
    const at::Tensor& shard = tensor();
    const at::Tensor& whole = other.tensor();
    return dtype_ == other.dtype_ && shard.dim() > 0 && shard.dim() == whole.dim() &&
           whole.size(0) == shard.size(0) * factor &&
           shard.sizes().slice(1).equals(whole.sizes().slice(1));
  }
  bool is_like(const Plain& other) const {
    return dtype_ == other.dtype_ && tensor_->sizes().equals(other.tensor_->sizes());
  }
  // Tells autograd that the values have changed.
  void written() const {
    if (!tensor_->is_inference()) tensor_->unsafeGetTensorImpl()->bump_version();
  }

 private:
  const at::Tensor* tensor_ = nullptr;
  std::optional<DType> dtype_;
};

template <typename AnyBlock>
c10::SmallVector<AnyBlock, 16> consecutive(std::byte* data, std::size_t count, DType dtype, int n) {
  c10::SmallVector<AnyBlock, 16> blocks;
  for (int r = 0; r < n; ++r) blocks.push_back({data + r * count * size_of(dtype), count});
  return blocks;
}

// Empty unless it is an int and a rank of the group.
inline std::optional<int> root_of(PyObject* object, const shm::Communicator& seat) {
  if (!PyLong_CheckExact(object)) return std::nullopt;
  int overflow = 0;
  const long root = PyLong_AsLongAndOverflow(object, &overflow);
  if (overflow != 0 || root < 0 || root >= seat.size()) return std::nullopt;
  return static_cast<int>(root);
}

inline PyObject* given_back(PyObject* object) {
  Py_INCREF(object);
  return object;
}

// `object`, or where that is None a new tensor of the shape. Owns what it makes.
class Out {
 public:
  Out(PyObject* object, const Plain& like, at::IntArrayRef shape) {
    if (object == Py_None) {
      try {
        made_ = pybind11::reinterpret_steal<pybind11::object>(
            c10::multiply_integers(shape) == 0
                ? without_elements(shape, like.tensor().scalar_type())
                : THPVariable_Wrap(at::empty(shape, like.tensor().options())));
        object = made_.ptr();
      } catch (const c10::Error&) {
        // Too large. It stays None, which is another case: there the other ranks hear of it.
      }
    }
    object_ = object;
  }
  PyObject* object() const { return object_; }

 private:
  // What all but the root get of a gather: making it anew would be a third of a small call's time.
  // The last one is given again where nobody else has it any more. With the GIL; a new reference.
  static PyObject* without_elements(at::IntArrayRef shape, at::ScalarType type) {
    static PyObject* last = nullptr;
    if (last != nullptr && Py_REFCNT(last) == 1) {
      const at::Tensor& tensor = THPVariable_Unpack(last);
      if (tensor.use_count() == 1 && tensor.sizes() == shape && tensor.scalar_type() == type &&
          !tensor.requires_grad() && tensor.is_inference() == c10::InferenceMode::is_enabled()) {
        Py_INCREF(last);
        return last;
      }
    }
    PyObject* made = THPVariable_Wrap(at::Tensor(at::detail::empty_cpu(shape, type)));
    if (made == nullptr) throw pybind11::error_already_set();
    Py_INCREF(made);
    Py_XSETREF(last, made);
    return made;
  }

  pybind11::object made_;
  PyObject* object_;
};

inline c10::SmallVector<std::int64_t, 8> with_first(const at::Tensor& tensor, std::int64_t first) {
  c10::SmallVector<std::int64_t, 8> shape(tensor.sizes().begin(), tensor.sizes().end());
  shape[0] = first;
  return shape;
}

}  // namespace pyparallel::dist
