// The common case of each collective of pyparallel.comm.Communicator on its shortest way: plain
// tensors, shards along dimension 0, the communicator's timeout, not asynchronous. A call of a
// few kilobytes takes about a microsecond in the core; checking the same tensors in Python takes
// five to ten. Each method gives the call's result, or None where the case is another one: then
// pyparallel/comm/collectives.py goes on, checks everything and says what is wrong.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "base/deadline.h"
#include "python/fast_methods.h"
#include "shm/communicator.h"

namespace pyparallel::dist {

struct FastCalls {
  std::shared_ptr<shm::Communicator> seat;
};

// Gives a new reference, or nullptr for "another case".
using FastBody = PyObject* (*)(shm::Communicator&, PyObject* const*, Deadline);

template <FastBody body, Py_ssize_t expected>
PyObject* counted(FastCalls& calls, PyObject* const* args, Py_ssize_t given) {
  if (given != expected) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, %zd given", expected, given);
    throw pybind11::error_already_set();
  }
  shm::Communicator& seat = *calls.seat;
  return body(seat, args, Deadline::after(seat.timeout()));
}

template <FastBody body, Py_ssize_t expected>
PyMethodDef fast_call(const char* name, const char* parameters) {
  return python::fast_method<FastCalls, &counted<body, expected>>(name, parameters);
}

void register_fast_calls(pybind11::module_& m);
// Adds those of fast_uneven.cpp and fast_messages.cpp to the class.
void add_uneven_calls(pybind11::handle cls);
void add_message_calls(pybind11::handle cls);

}  // namespace pyparallel::dist
