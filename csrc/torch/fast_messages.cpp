// Send and receive among the fast calls (fast_calls.h).
#include <torch/csrc/utils/pybind.h>

#include "torch/fast_calls.h"
#include "torch/plain_tensors.h"

namespace pyparallel::dist {
namespace {

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

}  // namespace

void add_message_calls(pybind11::handle cls) {
  static PyMethodDef methods[] = {
      fast_call<send, 3>("send", "x, to, tag"),
      fast_call<recv, 3>("recv", "out, source, tag"),
  };
  python::add_fast_methods(cls, methods);
}

}  // namespace pyparallel::dist
