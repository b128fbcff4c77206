// A method whose misfits are told: a call that does not bind to the signature (an unknown keyword,
// an argument too many or too few) raises before the first line of the method, which could refuse
// it on all ranks. This stands around the method, for some 20 ns a call; a function in Python
// around it would cost as much as the core's own way to a small all-reduce.
#include "python/rooms.h"

namespace py = pybind11;

namespace pyparallel::python {
namespace {

struct Announced {
  PyObject_HEAD;
  PyObject* method;
  PyObject* refuse;  // (arguments, keywords, the TypeError) -> the exception to raise
  PyObject* attributes;
  vectorcallfunc call;
};

Announced* of(PyObject* self) { return reinterpret_cast<Announced*>(self); }

// What the method's own lines raise has a traceback; what binding raises has none yet.
bool is_misfit(const py::error_already_set& error) {
  return error.matches(PyExc_TypeError) && !error.trace();
}

PyObject* call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* names) {
  PyObject* result = PyObject_Vectorcall(of(self)->method, arguments, flags, names);
  if (result != nullptr || PyErr_ExceptionMatches(PyExc_TypeError) == 0) return result;
  py::error_already_set error;
  if (!is_misfit(error)) {
    error.restore();
    return nullptr;
  }
  try {
    const auto given = PyVectorcall_NARGS(flags);
    py::tuple positional(given);
    for (Py_ssize_t i = 0; i < given; ++i) positional[i] = py::handle(arguments[i]);
    py::dict keywords;
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t i = 0; i < named; ++i)
      keywords[py::handle(PyTuple_GET_ITEM(names, i))] = py::handle(arguments[given + i]);
    const py::object told = py::handle(of(self)->refuse)(positional, keywords, error.value());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(told.ptr())), told.ptr());
  } catch (py::error_already_set& failed) {
    failed.restore();
  }
  return nullptr;
}

PyObject* bind(PyObject* self, PyObject* object, PyObject*) {
  if (object != nullptr) return PyMethod_New(self, object);
  Py_INCREF(self);
  return self;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(of(self)->method);
  Py_VISIT(of(self)->refuse);
  Py_VISIT(of(self)->attributes);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(of(self)->method);
  Py_CLEAR(of(self)->refuse);
  Py_CLEAR(of(self)->attributes);
  return 0;
}

void destroy(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject type;  // all zero but for what follows

PyTypeObject* ready_type() {
  static PyGetSetDef properties[] = {
      {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  Py_SET_REFCNT(reinterpret_cast<PyObject*>(&type), 1);
  type.tp_name = "pyparallel._core.Announced";
  type.tp_basicsize = sizeof(Announced);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                  Py_TPFLAGS_METHOD_DESCRIPTOR;
  type.tp_vectorcall_offset = offsetof(Announced, call);
  type.tp_dictoffset = offsetof(Announced, attributes);
  type.tp_call = PyVectorcall_Call;
  type.tp_descr_get = bind;
  type.tp_traverse = traverse;
  type.tp_clear = clear;
  type.tp_dealloc = destroy;
  type.tp_getset = properties;
  if (PyType_Ready(&type) < 0) throw py::error_already_set();
  return &type;
}

}  // namespace

void register_announced(py::module_& m) {
  m.def(
      "announced",
      [type = ready_type()](const py::object& method, const py::object& refuse) {
        auto made = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
        if (!made) throw py::error_already_set();
        Announced* self = of(made.ptr());
        self->method = py::object(method).release().ptr();
        self->refuse = py::object(refuse).release().ptr();
        self->call = call;
        return made;
      },
      py::arg("method"), py::arg("refuse"),
      "`method`, for a class: where a call of it does not bind to the signature, "
      "refuse(arguments, keywords, error) gives what is raised.");
}

}  // namespace pyparallel::python
