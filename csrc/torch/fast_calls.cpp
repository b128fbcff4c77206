// The common case of each collective of pyparallel.comm.Communicator on its shortest way: plain
// tensors, shards along dimension 0, the communicator's timeout, not asynchronous. A call of a
// few kilobytes takes about a microsecond in the core; checking the same tensors in Python takes
// five to ten. Each method gives the call's result, or None where the case is another one: then
// pyparallel/comm/collectives.py goes on, checks everything and says what is wrong.
#include "torch/fast_calls.h"

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <memory>
#include <optional>

#include "python/capsule.h"
#include "shm/communicator.h"

namespace py = pybind11;

namespace pyparallel::dist {
namespace {

using shm::Block;
using shm::ConstBlock;

struct FastCalls {
  std::shared_ptr<shm::Communicator> seat;
};

struct WithoutGil {
  WithoutGil() : state(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state); }
  PyThreadState* state;
};

std::optional<DType> dtype_of(at::ScalarType type) {
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
std::optional<shm::Reduction> reduction_of(PyObject* name, DType dtype) {
  if (!PyUnicode_CheckExact(name)) return std::nullopt;
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name, &length);
  if (text == nullptr) throw py::error_already_set();
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

// Uneven shards: how many rows each rank has. False unless a list of one size per rank.
class Sizes {
 public:
  Sizes(PyObject* list, int ranks) {
    if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != ranks) return;
    for (int r = 0; r < ranks; ++r) {
      PyObject* size = PyList_GET_ITEM(list, r);
      if (!PyLong_CheckExact(size)) return;
      int overflow = 0;
      const long long rows = PyLong_AsLongLongAndOverflow(size, &overflow);
      constexpr long long most = 1LL << 40;  // so that no sum or product overflows
      if (overflow != 0 || rows < 0 || rows > most) return;
      rows_.push_back(rows);
      sum_ += rows;
    }
    valid_ = true;
  }
  explicit operator bool() const { return valid_; }
  std::int64_t sum() const { return sum_; }
  std::int64_t operator[](int rank) const { return rows_[rank]; }

  // `whole` has these rows together, `shard` those of `rank`, and rows are alike. Not for tensors
  // without elements, whose rows have no size.
  bool divide(const Plain& whole, const Plain& shard, int rank) const {
    return counts_rows_of(whole) && shard.tensor().dim() == whole.tensor().dim() &&
           shard.dtype() == whole.dtype() && shard.tensor().size(0) == rows_[rank] &&
           shard.tensor().sizes().slice(1).equals(whole.tensor().sizes().slice(1));
  }
  bool counts_rows_of(const Plain& whole) const {
    return whole.count() > 0 && whole.tensor().dim() > 0 && whole.tensor().size(0) == sum_;
  }
  template <typename AnyBlock>
  c10::SmallVector<AnyBlock, 16> blocks(const Plain& whole) const {
    const std::size_t row = whole.count() / static_cast<std::size_t>(sum_);
    std::byte* data = whole.data();
    c10::SmallVector<AnyBlock, 16> found;
    for (const std::int64_t rows : rows_) {
      found.push_back({data, static_cast<std::size_t>(rows) * row});
      data += found.back().count * size_of(whole.dtype());
    }
    return found;
  }

 private:
  bool valid_ = false;
  std::int64_t sum_ = 0;
  c10::SmallVector<std::int64_t, 16> rows_;
};

// Empty unless it is an int and a rank of the group.
std::optional<int> root_of(PyObject* object, const shm::Communicator& seat) {
  if (!PyLong_CheckExact(object)) return std::nullopt;
  int overflow = 0;
  const long root = PyLong_AsLongAndOverflow(object, &overflow);
  if (overflow != 0 || root < 0 || root >= seat.size()) return std::nullopt;
  return static_cast<int>(root);
}

PyObject* given_back(PyObject* object) {
  Py_INCREF(object);
  return object;
}

// `object`, or where that is None a new tensor of the shape. Owns what it makes.
class Out {
 public:
  Out(PyObject* object, const Plain& like, at::IntArrayRef shape) {
    if (object == Py_None) {
      try {
        made_ = py::reinterpret_steal<py::object>(
            THPVariable_Wrap(at::empty(shape, like.tensor().options())));
        object = made_.ptr();
      } catch (const c10::Error&) {
        // Too large. It stays None, which is another case: there the other ranks hear of it.
      }
    }
    object_ = object;
  }
  PyObject* object() const { return object_; }

 private:
  py::object made_;
  PyObject* object_;
};

c10::SmallVector<std::int64_t, 8> with_first(const at::Tensor& tensor, std::int64_t first) {
  c10::SmallVector<std::int64_t, 8> shape(tensor.sizes().begin(), tensor.sizes().end());
  shape[0] = first;
  return shape;
}

// --- the calls: nullptr stands for "another case"

PyObject* all_reduce(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain x(args[0]);
  if (!x) return nullptr;
  const auto reduction = reduction_of(args[1], x.dtype());
  const bool in_place = args[2] == Py_None;
  const Plain out(in_place ? args[0] : args[2]);
  if (!reduction || !out || !out.is_like(x) || !out.disjoint(x)) return nullptr;
  {
    const WithoutGil without_gil;
    seat.all_reduce(x.data(), out.data(), x.count(), x.dtype(), *reduction, deadline);
  }
  out.written();
  return given_back(in_place ? args[0] : args[2]);
}

PyObject* reduce(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain x(args[0]);
  if (!x) return nullptr;
  const auto reduction = reduction_of(args[1], x.dtype());
  const auto root = root_of(args[2], seat);
  const bool in_place = args[3] == Py_None;
  const Plain out(in_place ? args[0] : args[3]);
  if (!reduction || !root || !out || !out.is_like(x) || !out.disjoint(x)) return nullptr;
  {
    const WithoutGil without_gil;
    seat.reduce(x.data(), out.data(), x.count(), x.dtype(), *reduction, *root, deadline);
  }
  if (seat.rank() == *root) out.written();
  return given_back(in_place ? args[0] : args[3]);
}

PyObject* broadcast(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain x(args[0]);
  const auto root = root_of(args[1], seat);
  if (!x || !root) return nullptr;
  {
    const WithoutGil without_gil;
    seat.broadcast(x.data(), x.count(), x.dtype(), *root, deadline);
  }
  if (seat.rank() != *root) x.written();
  return given_back(args[0]);
}

PyObject* all_gather(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain x(args[0]);
  if (!x || x.tensor().dim() == 0) return nullptr;
  const int n = seat.size();
  const Out result(args[1], x, with_first(x.tensor(), x.tensor().size(0) * n));
  const Plain out(result.object());
  if (!out || !x.is_shard_of(out, n) || !out.disjoint(x)) return nullptr;
  const auto blocks = consecutive<Block>(out.data(), x.count(), x.dtype(), n);
  {
    const WithoutGil without_gil;
    seat.all_gather(x.data(), blocks.data(), x.dtype(), deadline);
  }
  out.written();
  return given_back(result.object());
}

PyObject* reduce_scatter(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain x(args[0]);
  const int n = seat.size();
  if (!x || x.tensor().dim() == 0 || x.tensor().size(0) % n != 0) return nullptr;
  const auto reduction = reduction_of(args[1], x.dtype());
  if (!reduction) return nullptr;
  const Out result(args[2], x, with_first(x.tensor(), x.tensor().size(0) / n));
  const Plain out(result.object());
  if (!out || !out.is_shard_of(x, n) || !out.disjoint(x)) return nullptr;
  const auto blocks = consecutive<ConstBlock>(x.data(), out.count(), x.dtype(), n);
  {
    const WithoutGil without_gil;
    seat.reduce_scatter(blocks.data(), out.data(), x.dtype(), *reduction, deadline);
  }
  out.written();
  return given_back(result.object());
}

PyObject* all_to_all(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain x(args[0]);
  const int n = seat.size();
  if (!x || x.tensor().dim() == 0 || x.tensor().size(0) % n != 0) return nullptr;
  const Out result(args[1], x, x.tensor().sizes());
  const Plain out(result.object());
  if (!out || !out.is_like(x) || !out.disjoint(x)) return nullptr;
  const std::size_t count = x.count() / static_cast<std::size_t>(n);
  const auto from = consecutive<ConstBlock>(x.data(), count, x.dtype(), n);
  const auto to = consecutive<Block>(out.data(), count, x.dtype(), n);
  {
    const WithoutGil without_gil;
    seat.all_to_all(from.data(), to.data(), x.dtype(), deadline);
  }
  out.written();
  return given_back(result.object());
}

PyObject* all_gather_uneven(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain x(args[0]);
  const Sizes sizes(args[2], seat.size());
  if (!x || x.tensor().dim() == 0 || !sizes) return nullptr;
  const Out result(args[1], x, with_first(x.tensor(), sizes.sum()));
  const Plain out(result.object());
  if (!out || !sizes.divide(out, x, seat.rank()) || !out.disjoint(x)) return nullptr;
  const auto blocks = sizes.blocks<Block>(out);
  {
    const WithoutGil without_gil;
    seat.all_gather(x.data(), blocks.data(), x.dtype(), deadline);
  }
  out.written();
  return given_back(result.object());
}

PyObject* reduce_scatter_uneven(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain x(args[0]);
  const Sizes sizes(args[3], seat.size());
  if (!x || x.tensor().dim() == 0 || !sizes) return nullptr;
  const auto reduction = reduction_of(args[1], x.dtype());
  if (!reduction) return nullptr;
  const Out result(args[2], x, with_first(x.tensor(), sizes[seat.rank()]));
  const Plain out(result.object());
  if (!out || !sizes.divide(x, out, seat.rank()) || !out.disjoint(x)) return nullptr;
  const auto blocks = sizes.blocks<ConstBlock>(x);
  {
    const WithoutGil without_gil;
    seat.reduce_scatter(blocks.data(), out.data(), x.dtype(), *reduction, deadline);
  }
  out.written();
  return given_back(result.object());
}

PyObject* all_to_all_uneven(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain x(args[0]);
  const Sizes sent(args[2], seat.size());
  const Sizes received(args[3], seat.size());
  if (!x || !sent || !received || !sent.counts_rows_of(x)) return nullptr;
  if (sent[seat.rank()] != received[seat.rank()]) return nullptr;
  const Out result(args[1], x, with_first(x.tensor(), received.sum()));
  const Plain out(result.object());
  if (!out || !received.counts_rows_of(out) || out.dtype() != x.dtype() || !out.disjoint(x) ||
      !out.tensor().sizes().slice(1).equals(x.tensor().sizes().slice(1)))
    return nullptr;
  const auto from = sent.blocks<ConstBlock>(x);
  const auto to = received.blocks<Block>(out);
  {
    const WithoutGil without_gil;
    seat.all_to_all(from.data(), to.data(), x.dtype(), deadline);
  }
  out.written();
  return given_back(result.object());
}

PyObject* scatter(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain out(args[1]);
  const auto root = root_of(args[2], seat);
  if (!out || out.tensor().dim() == 0 || !root) return nullptr;
  const int n = seat.size();
  c10::SmallVector<ConstBlock, 16> blocks;
  if (seat.rank() == *root) {
    const Plain x(args[0]);
    if (!x || !out.is_shard_of(x, n) || !out.disjoint(x)) return nullptr;
    blocks = consecutive<ConstBlock>(x.data(), out.count(), out.dtype(), n);
  } else if (args[0] != Py_None) {
    return nullptr;
  }
  {
    const WithoutGil without_gil;
    seat.scatter(blocks.data(), {out.data(), out.count()}, out.dtype(), *root, deadline);
  }
  out.written();
  return given_back(args[1]);
}

PyObject* gather(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain x(args[0]);
  const auto root = root_of(args[2], seat);
  if (!x || x.tensor().dim() == 0 || !root) return nullptr;
  const int n = seat.size();
  const bool on_root = seat.rank() == *root;
  if (!on_root && args[1] != Py_None) return nullptr;
  const Out result(args[1], x, with_first(x.tensor(), on_root ? x.tensor().size(0) * n : 0));
  c10::SmallVector<Block, 16> blocks;
  if (on_root) {
    const Plain out(result.object());
    if (!out || !x.is_shard_of(out, n) || !out.disjoint(x)) return nullptr;
    blocks = consecutive<Block>(out.data(), x.count(), x.dtype(), n);
    out.written();
  }
  {
    const WithoutGil without_gil;
    seat.gather({x.data(), x.count()}, blocks.data(), x.dtype(), *root, deadline);
  }
  return given_back(result.object());
}

// A message's tag; empty unless an int.
std::optional<std::int64_t> tag_of(PyObject* object) {
  if (!PyLong_CheckExact(object)) return std::nullopt;
  int overflow = 0;
  const long long tag = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0) return std::nullopt;
  return tag;
}

PyObject* send(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain x(args[0]);
  const auto to = root_of(args[1], seat);
  const auto tag = tag_of(args[2]);
  if (!x || !to || !tag) return nullptr;
  {
    const WithoutGil without_gil;
    seat.send(x.data(), x.count(), x.dtype(), *to, *tag, deadline);
  }
  return given_back(args[0]);
}

PyObject* recv(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain out(args[0]);
  const auto source = root_of(args[1], seat);
  const auto tag = tag_of(args[2]);
  if (!out || !source || !tag) return nullptr;
  {
    const WithoutGil without_gil;
    seat.recv(out.data(), out.count(), out.dtype(), *source, *tag, deadline);
  }
  out.written();
  return given_back(args[0]);
}

// --- from a call above to a method of the class

using Body = PyObject* (*)(shm::Communicator&, PyObject* const*, Deadline);

template <Body body, Py_ssize_t expected>
PyObject* entry(PyObject* self, PyObject* const* args, Py_ssize_t given) {
  if (given != expected) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, %zd given", expected, given);
    return nullptr;
  }
  try {
    auto* instance = reinterpret_cast<py::detail::instance*>(self);
    auto* calls = static_cast<FastCalls*>(instance->get_value_and_holder().value_ptr());
    shm::Communicator& seat = *calls->seat;
    PyObject* result = body(seat, args, Deadline::after(seat.timeout()));
    if (result != nullptr) return result;
    Py_RETURN_NONE;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    py::detail::try_translate_exceptions();
  }
  return nullptr;
}

template <Body body, Py_ssize_t expected>
PyMethodDef method(const char* name, const char* parameters) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&entry<body, expected>)),
          METH_FASTCALL, parameters};
}

}  // namespace

void register_fast_calls(py::module_& m) {
  py::class_<FastCalls> cls(m, "FastCalls", "The common case of each collective, checked in C++.");
  cls.def(
      py::init([](const py::object& capsule) { return FastCalls{python::from_capsule(capsule)}; }),
      py::arg("communicator"));
  static PyMethodDef methods[] = {
      method<all_reduce, 3>("all_reduce", "x, op, out or None"),
      method<reduce, 4>("reduce", "x, op, root, out or None"),
      method<broadcast, 2>("broadcast", "x, root"),
      method<all_gather, 2>("all_gather", "x, out or None"),
      method<reduce_scatter, 3>("reduce_scatter", "x, op, out or None"),
      method<all_to_all, 2>("all_to_all", "x, out or None"),
      method<scatter, 3>("scatter", "x or None, out, root"),
      method<gather, 3>("gather", "x, out or None, root"),
      method<all_gather_uneven, 3>("all_gather_uneven", "x, out or None, sizes"),
      method<reduce_scatter_uneven, 4>("reduce_scatter_uneven", "x, op, out or None, sizes"),
      method<all_to_all_uneven, 4>("all_to_all_uneven", "x, out or None, in_sizes, out_sizes"),
      method<send, 3>("send", "x, to, tag"),
      method<recv, 3>("recv", "out, source, tag"),
  };
  auto* type = reinterpret_cast<PyTypeObject*>(cls.ptr());
  for (PyMethodDef& one : methods) {
    auto descriptor = py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &one));
    if (!descriptor) throw py::error_already_set();
    py::setattr(cls, one.ml_name, descriptor);
  }
}

}  // namespace pyparallel::dist
