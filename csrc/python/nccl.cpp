// pyparallel._core.nccl: csrc/nccl as Python sees it. Addresses and streams are integers, element
// types are Element objects that Python looks up once; pyparallel/comm/nccl*.py turns tensors into
// them. The GIL is released around every call that may wait.
#include <array>
#include <optional>
#include <utility>

#include "nccl/communicator.h"
#include "nccl/driver.h"
#include "python/dlpack.h"
#include "python/nccl_room.h"
#include "python/rooms.h"

namespace py = pybind11;

namespace pyparallel::python {
namespace {

using nccl::Element;
using nccl::Library;

// --- errors: one Python class per result code, given by pyparallel/comm/nccl_errors.py

std::array<PyObject*, 9> error_classes{};  // by code; index 0 is for codes unknown here

void set_error_classes(const py::dict& classes) {
  for (const auto& [code, error_class] : classes) {
    const auto index = code.cast<std::size_t>();
    PYPARALLEL_REQUIRE(index < error_classes.size(), "no class is needed for result code ", index);
    error_classes[index] = py::reinterpret_borrow<py::object>(error_class).release().ptr();
  }
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const nccl::ResultError& error) {
    const auto code = static_cast<std::size_t>(error.code());
    PyObject* known = code < error_classes.size() ? error_classes[code] : nullptr;
    PyObject* error_class = known != nullptr ? known : error_classes[0];
    if (error_class == nullptr) throw;  // the common class is for errors.cpp
    py::object raised = py::reinterpret_borrow<py::object>(error_class)(error.what());
    raised.attr("code") = static_cast<int>(error.code());
    PyErr_SetObject(error_class, raised.ptr());
  }
}

void register_library(py::module_& m) {
  py::class_<Element>(m, "Element", "An element type as NCCL counts it.")
      .def_property_readonly("name", [](const Element& e) { return e.name; })
      .def_property_readonly("nccl_type", [](const Element& e) { return static_cast<int>(e.type); })
      .def_property_readonly("itemsize",
                             [](const Element& e) { return e.units * nccl::info_of(e.type).bytes; })
      .def_readonly("reducible", &Element::reducible);
  m.def(
      "element", [](const std::string& name) { return nccl::element_named(name); }, py::arg("name"),
      "The element type of that name, or None when NCCL cannot carry it.");

  py::class_<Library, std::shared_ptr<Library>>(m, "Library")
      .def_property_readonly("path", &Library::path)
      .def_property_readonly("origin", &Library::origin)
      .def_property_readonly("version", &Library::version)
      .def_property_readonly("version_text",
                             [](const Library& l) { return nccl::version_text(l.version()); })
      .def_property_readonly("missing", &Library::missing)
      .def_property_readonly("interposer", &Library::interposer)
      .def_property_readonly("deep_bound", &Library::deep_bound)
      .def("unique_id", [](const Library& l) { return id_bytes(nccl::make_unique_id(l)); });

  const auto options = [](const std::string& path, const std::vector<std::string>& wheel_folders,
                          const std::vector<std::string>& probe_command) {
    return nccl::LoadOptions{path, wheel_folders, probe_command};
  };
  const auto shared = [](std::shared_ptr<const Library> library) {
    return std::const_pointer_cast<Library>(library);  // pybind11 holds no pointers to const
  };
  m.def(
      "open_library",
      [=](const std::string& path, const std::vector<std::string>& wheel_folders,
          const std::vector<std::string>& probe_command) {
        return shared(Library::open(options(path, wheel_folders, probe_command)));
      },
      py::arg("path"), py::arg("wheel_folders"), py::arg("probe_command"), Released());
  m.def(
      "process_library",
      [=](const std::string& path) { return shared(Library::process(options(path, {}, {}))); },
      py::arg("path") = "", Released());
  m.def("set_default_options", [=](const std::vector<std::string>& wheel_folders,
                                   const std::vector<std::string>& probe_command) {
    Library::set_default_options(options("", wheel_folders, probe_command));
  });
  m.def("symbols", [] {
    py::list list;
    for (const nccl::SymbolInfo& symbol : nccl::symbols()) {
      list.append(py::make_tuple(symbol.name, nccl::version_text(symbol.since), symbol.required));
    }
    return list;
  });
  m.def("data_types", [] {
    py::list list;
    for (int i = 0; i < nccl::data_type_count; ++i) {
      const nccl::DataTypeInfo& info = nccl::info_of(static_cast<nccl::DataType>(i));
      list.append(py::make_tuple(info.name, nccl::version_text(info.since)));
    }
    return list;
  });
  m.def("loaded_copies", [](const std::string& ours) {
    py::list list;
    for (const nccl::LoadedCopy& copy : nccl::loaded_copies(ours)) {
      list.append(py::make_tuple(copy.path, copy.ours, copy.deleted));
    }
    return list;
  });
}

void register_options(py::module_& m) {
  auto config = py::class_<nccl::Config>(m, "Config").def(py::init<>());
#define PYPARALLEL_NCCL_PYTHON_FIELD(name, type, major, minor, patch) \
  config.def_readwrite(#name, &nccl::Config::name);
  PYPARALLEL_NCCL_CONFIG_FIELDS(PYPARALLEL_NCCL_PYTHON_FIELD)
#undef PYPARALLEL_NCCL_PYTHON_FIELD

  m.def("config_fields", [] {
    py::list list;
#define PYPARALLEL_NCCL_PYTHON_SINCE(name, type, major, minor, patch) \
  list.append(py::make_tuple(#name, nccl::version_text(nccl::version_code(major, minor, patch))));
    PYPARALLEL_NCCL_CONFIG_FIELDS(PYPARALLEL_NCCL_PYTHON_SINCE)
#undef PYPARALLEL_NCCL_PYTHON_SINCE
    return list;
  });

  py::class_<nccl::Options>(m, "Options")
      .def(py::init([](const std::string& name, double timeout, std::optional<bool> blocking,
                       bool watch, bool abort_on_error, const nccl::Config& config) {
             return nccl::Options{name,  milliseconds(timeout), blocking,
                                  watch, abort_on_error,        config};
           }),
           py::arg("name"), py::arg("timeout"), py::arg("blocking"), py::arg("watch"),
           py::arg("abort_on_error"), py::arg("config"));
}

}  // namespace

void register_nccl(py::module_& parent) {
  py::module_ m = parent.def_submodule("nccl", "NCCL found at run time.");
  // Of this module: where torch has the same pybind11 (2.14), _torch's translator, which knows no
  // classes below NcclError, would be asked first.
  py::register_local_exception_translator(&translate);
  m.def("set_error_classes", &set_error_classes);
  m.def("use_driver", &nccl::use_driver, py::arg("library"), "Takes a stand-in for libcuda.so.1.");
  m.def("dlpack", &describe_dlpack, py::arg("capsule"));
  m.def(
      "process_ends",
      [](double timeout) { nccl::process_ends(Deadline::after(milliseconds(timeout))); },
      py::arg("timeout"), Released());
  register_library(m);
  register_options(m);
  register_nccl_communicator(m);
  register_nccl_memory(m);
}

}  // namespace pyparallel::python
