// Collectives with equal shards, and the class that holds all fast calls.
#include "torch/fast_calls.h"

#include <torch/csrc/utils/pybind.h>

#include "python/capsule.h"
#include "torch/plain_tensors.h"

namespace py = pybind11;

namespace pyparallel::dist {
namespace {

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

}  // namespace

void register_fast_calls(py::module_& m) {
  py::class_<FastCalls> cls(m, "FastCalls", "The common case of each collective, checked in C++.");
  cls.def(
      py::init([](const py::object& capsule) { return FastCalls{python::from_capsule(capsule)}; }),
      py::arg("communicator"));
  static PyMethodDef methods[] = {
      fast_call<all_reduce, 3>("all_reduce", "x, op, out or None"),
      fast_call<reduce, 4>("reduce", "x, op, root, out or None"),
      fast_call<broadcast, 2>("broadcast", "x, root"),
      fast_call<all_gather, 2>("all_gather", "x, out or None"),
      fast_call<reduce_scatter, 3>("reduce_scatter", "x, op, out or None"),
      fast_call<all_to_all, 2>("all_to_all", "x, out or None"),
      fast_call<scatter, 3>("scatter", "x or None, out, root"),
      fast_call<gather, 3>("gather", "x, out or None, root"),
  };
  python::add_fast_methods(cls, methods);
  add_uneven_calls(cls);
  add_message_calls(cls);
}

}  // namespace pyparallel::dist
