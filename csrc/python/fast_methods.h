// Methods of a pybind11 class on CPython's fast calling convention: without pybind11's conversion
// of arguments, which would cost as much as a small all-reduce itself.
#pragma once

#include <pybind11/pybind11.h>

namespace pyparallel::python {

// Releases the GIL for its lifetime; cheaper than pybind11's own, which keeps more state.
struct WithoutGil {
  WithoutGil() : state(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  PyThreadState* state;
};

// A table entry for `body(Self&, PyObject* const* values, Py_ssize_t given) -> PyObject*`, which
// gives a new reference, or nullptr for None, and may throw.
template <typename Self, auto body>
PyMethodDef fast_method(const char* name, const char* parameters) {
  namespace py = pybind11;
  constexpr auto entry = [](PyObject* self, PyObject* const* values,
                            Py_ssize_t given) -> PyObject* {
    try {
      auto* instance = reinterpret_cast<py::detail::instance*>(self);
      auto* object = static_cast<Self*>(instance->get_value_and_holder().value_ptr());
      if (object == nullptr) throw py::type_error("the object was never made");
      PyObject* result = body(*object, values, given);
      if (result != nullptr) return result;
      Py_RETURN_NONE;
    } catch (py::error_already_set& error) {
      error.restore();
    } catch (...) {
      py::detail::try_translate_exceptions();
    }
    return nullptr;
  };
  PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t) = entry;
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL,
          parameters};
}

// `methods` must live as long as the class.
template <std::size_t count>
void add_fast_methods(pybind11::handle cls, PyMethodDef (&methods)[count]) {
  auto* type = reinterpret_cast<PyTypeObject*>(cls.ptr());
  for (PyMethodDef& method : methods) {
    auto descriptor =
        pybind11::reinterpret_steal<pybind11::object>(PyDescr_NewMethod(type, &method));
    if (!descriptor) throw pybind11::error_already_set();
    pybind11::setattr(cls, method.ml_name, descriptor);
  }
}

}  // namespace pyparallel::python
