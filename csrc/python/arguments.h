// The arguments of the thin calls of communicator.cpp: addresses, counts and codes as Python
// integers.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "base/error.h"
#include "shm/communicator.h"

namespace pyparallel::python {

// Takes the arguments of a vectorcall from left to right; a misfit throws.
class Arguments {
 public:
  Arguments(const char* name, PyObject* const* values, Py_ssize_t given, Py_ssize_t expected)
      : next_(values) {
    if (given == expected) return;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, %zd given", name, expected, given);
    throw pybind11::error_already_set();
  }

  PyObject* object() { return *next_++; }

  long long integer() {
    const long long value = PyLong_AsLongLong(object());
    if (value == -1 && PyErr_Occurred()) throw pybind11::error_already_set();
    return value;
  }
  int small() { return checked_small(integer()); }
  bool flag() { return object() == Py_True; }

  double real() {
    const double value = PyFloat_AsDouble(object());
    if (value == -1.0 && PyErr_Occurred()) throw pybind11::error_already_set();
    return value;
  }

  void* address() { return address_of(object()); }
  std::size_t count() { return count_of(object()); }

  DType dtype() {
    const long long code = integer();
    PYPARALLEL_REQUIRE(code >= 0 && code < static_cast<int>(DType::count_), "unknown dtype ", code);
    return static_cast<DType>(code);
  }
  shm::Reduction reduction() {
    const long long code = integer();
    PYPARALLEL_REQUIRE(code >= 0 && code < static_cast<int>(ReduceOp::count_), "unknown reduction ",
                       code);
    return shm::Reduction{static_cast<ReduceOp>(code), real()};
  }

  // Takes two arguments: addresses and counts.
  template <typename AnyBlock>
  std::vector<AnyBlock> blocks(int size, DType dtype) {
    PyObject* where = object();
    PyObject* counts = object();
    std::vector<AnyBlock> result(size);
    const bool listed = !PyLong_Check(where);
    const bool counted = !PyLong_Check(counts);
    if (counted) check_length(counts, size);
    if (listed) check_length(where, size);
    char* base = listed ? nullptr : static_cast<char*>(address_of(where));
    for (int r = 0; r < size; ++r) {
      const std::size_t n = count_of(counted ? PyList_GET_ITEM(counts, r) : counts);
      result[r].data = listed ? address_of(PyList_GET_ITEM(where, r)) : base;
      result[r].count = n;
      if (!listed) base += n * size_of(dtype);
    }
    return result;
  }

 private:
  static int checked_small(long long value) {
    PYPARALLEL_REQUIRE(value >= INT32_MIN && value <= INT32_MAX, "rank ", value, " out of range");
    return static_cast<int>(value);
  }
  static void* address_of(PyObject* object) {
    void* value = PyLong_AsVoidPtr(object);
    if (value == nullptr && PyErr_Occurred()) throw pybind11::error_already_set();
    return value;
  }
  static std::size_t count_of(PyObject* object) {
    const std::size_t value = PyLong_AsSize_t(object);
    if (value == static_cast<std::size_t>(-1) && PyErr_Occurred())
      throw pybind11::error_already_set();
    return value;
  }
  static void check_length(PyObject* list, int size) {
    if (PyList_Check(list) && PyList_GET_SIZE(list) == size) return;
    PyErr_Format(PyExc_TypeError, "expected a list of %d entries, one per rank, got %R", size,
                 list);
    throw pybind11::error_already_set();
  }

  PyObject* const* next_;
};

}  // namespace pyparallel::python
