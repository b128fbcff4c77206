// From C++ to Python: every class of base/error.h becomes its namesake in pyparallel.errors, and a
// Ctrl-C that comes during a wait becomes the exception that Python's signal handler raised.
// Compiled into _core and into _torch, each with its own pybind11.
#include <pybind11/pybind11.h>

#include <array>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/interrupt.h"
#include "python/rooms.h"

namespace py = pybind11;

namespace pyparallel::python {
namespace {

// In the order of Status. The classes live as long as the interpreter.
constexpr std::array<const char*, 14> class_names = {
    "CommError", "InvalidArgument", "Mismatch",    "Timeout",         "PeerLost",
    "Aborted",   "Closed",          "NoMemory",    "SystemCallError", "NcclError",
    "CudaError", "Unsupported",     "Interrupted", "CommError"};
std::array<PyObject*, class_names.size()> classes{};

PyObject* class_of(Status status) {
  const auto index = static_cast<std::size_t>(status);
  return index < classes.size() ? classes[index] : classes[0];
}

unsigned long main_thread = 0;

// Python runs signal handlers on its main thread only: other threads need not take the GIL to ask.
bool check_signals() {
  if (PyThread_get_thread_ident() != main_thread || !Py_IsInitialized()) return false;
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool raised = PyErr_CheckSignals() != 0;
  if (raised) {  // kept while the wait unwinds without the GIL, for this module or another
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    interrupt_note() = {{type, value, traceback}};
  }
  PyGILState_Release(state);
  return raised;
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const Interrupted& error) {
    const InterruptNote raised = std::exchange(interrupt_note(), {});
    const auto piece = [&](int i) { return static_cast<PyObject*>(raised.pieces[i]); };
    if (piece(0) != nullptr) {
      PyErr_Restore(piece(0), piece(1), piece(2));
    } else {
      PyErr_SetString(class_of(error.status()), error.what());
    }
  } catch (const Error& error) {
    PyErr_SetString(class_of(error.status()), error.what());
  }
}

}  // namespace

void register_errors(py::module_& m) {
  const py::module_ errors = py::module_::import("pyparallel.errors");
  for (std::size_t i = 0; i < classes.size(); ++i) {
    classes[i] = py::object(errors.attr(class_names[i])).release().ptr();
  }
  py::register_exception_translator(&translate);

  main_thread =
      py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  set_interrupt_check(&check_signals);

  m.def(
      "_throw",
      [](int status, const std::string& what) { throw_status(static_cast<Status>(status), what); },
      py::arg("status"), py::arg("what"), "Throws the C++ exception of a status code: for tests.");
}

}  // namespace pyparallel::python
