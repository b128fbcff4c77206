// pyparallel._core.nccl: csrc/nccl as Python sees it. Addresses and streams are integers, element
// types are Element objects that Python looks up once; pyparallel/comm/nccl*.py turns tensors into
// them. The GIL is released around every call that may wait.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <chrono>
#include <optional>
#include <utility>

#include "nccl/communicator.h"
#include "nccl/driver.h"
#include "nccl/group.h"
#include "nccl/memory.h"
#include "python/dlpack.h"
#include "python/rooms.h"

namespace py = pybind11;

namespace pyparallel::python {
namespace {

using nccl::Communicator;
using nccl::Element;
using nccl::Library;
using nccl::PreMulSum;
using nccl::Stream;
using nccl::UniqueId;
using Address = std::uintptr_t;
using Released = py::call_guard<py::gil_scoped_release>;
// Address and count of each rank's block.
using Blocks = std::vector<std::pair<Address, std::size_t>>;

template <typename T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

std::chrono::milliseconds milliseconds(double seconds) {
  PYPARALLEL_REQUIRE(seconds > 0 && seconds < 1e12, "a timeout of ", seconds, " s");
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3 + 0.999));
}

UniqueId id_from(const py::bytes& bytes) {
  const std::string_view view = bytes;
  PYPARALLEL_REQUIRE(view.size() == UniqueId::size, "a unique id has ", UniqueId::size,
                     " bytes, got ", view.size());
  UniqueId id{};
  view.copy(id.bytes, UniqueId::size);
  return id;
}

py::bytes bytes_of(const UniqueId& id) { return py::bytes(id.bytes, UniqueId::size); }

nccl::Reduction reduction(int op, std::shared_ptr<PreMulSum> premul_sum) {
  return {static_cast<ReduceOp>(op), std::move(premul_sum)};
}

std::vector<nccl::ConstBlock> readable(const Blocks& blocks) {
  std::vector<nccl::ConstBlock> list;
  for (const auto& [address, count] : blocks) list.push_back({pointer<const void>(address), count});
  return list;
}
std::vector<nccl::Block> writable(const Blocks& blocks) {
  std::vector<nccl::Block> list;
  for (const auto& [address, count] : blocks) list.push_back({pointer(address), count});
  return list;
}

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

// --- pieces

struct PyGroup {
  std::optional<nccl::Group> group;
  void enter() {
    PYPARALLEL_REQUIRE(!group.has_value(), "this group is in use; each `with` needs its own");
    group.emplace();
  }
  void exit(const py::object& error) {
    if (error.is_none()) {
      const py::gil_scoped_release released;
      struct Leave {
        std::optional<nccl::Group>& group;
        ~Leave() { group.reset(); }
      } leave{group};
      group->run();
    } else {
      group.reset();
    }
  }
};

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
      .def("unique_id", [](const Library& l) { return bytes_of(nccl::make_unique_id(l)); });

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

using Class = py::class_<Communicator, std::shared_ptr<Communicator>>;

void register_making(Class& c) {
  c.def_static(
      "init",
      [](const std::shared_ptr<Library>& library, const std::vector<py::bytes>& ids, int rank,
         int size, const nccl::Options& options) {
        std::vector<UniqueId> list;
        for (const py::bytes& id : ids) list.push_back(id_from(id));
        const py::gil_scoped_release released;
        return Communicator::init(library, list, rank, size, options);
      },
      py::arg("library"), py::arg("ids"), py::arg("rank"), py::arg("size"), py::arg("options"));
  c.def_static(
      "join_grown",
      [](const std::shared_ptr<Library>& library, const py::bytes& id, int rank, int size,
         const nccl::Options& options) {
        const UniqueId own = id_from(id);
        const py::gil_scoped_release released;
        return Communicator::join_grown(library, own, rank, size, options);
      },
      py::arg("library"), py::arg("id"), py::arg("rank"), py::arg("size"), py::arg("options"));
  c.def("split", &Communicator::split, py::arg("color"), py::arg("key"), py::arg("options"),
        Released());
  c.def("shrink", &Communicator::shrink, py::arg("excluded"), py::arg("abort_work"),
        py::arg("options"), Released());
  c.def("grow_id", [](Communicator& self) {
    UniqueId id{};
    {
      const py::gil_scoped_release released;
      id = self.grow_id();
    }
    return bytes_of(id);
  });
  c.def(
      "grow",
      [](Communicator& self, int size, const std::optional<py::bytes>& id,
         const std::optional<nccl::Options>& options) {
        std::optional<UniqueId> own;
        if (id.has_value()) own = id_from(*id);
        const py::gil_scoped_release released;
        return self.grow(size, own, options);
      },
      py::arg("size"), py::arg("id"), py::arg("options"));
}

void register_calls(Class& c) {
  c.def(
      "all_reduce",
      [](Communicator& self, Address in, Address out, std::size_t count, const Element& e, int op,
         std::shared_ptr<PreMulSum> premul, Address stream) {
        self.all_reduce(pointer(in), pointer(out), count, e, reduction(op, std::move(premul)),
                        pointer(stream));
      },
      Released());
  c.def(
      "reduce",
      [](Communicator& self, Address in, Address out, std::size_t count, const Element& e, int op,
         std::shared_ptr<PreMulSum> premul, int root, Address stream) {
        self.reduce(pointer(in), pointer(out), count, e, reduction(op, std::move(premul)), root,
                    pointer(stream));
      },
      Released());
  c.def(
      "broadcast",
      [](Communicator& self, Address in, Address out, std::size_t count, const Element& e, int root,
         Address stream) {
        self.broadcast(pointer(in), pointer(out), count, e, root, pointer(stream));
      },
      Released());
  c.def(
      "reduce_scatter",
      [](Communicator& self, Address in, Address out, std::size_t count, const Element& e, int op,
         std::shared_ptr<PreMulSum> premul, Address stream) {
        self.reduce_scatter(pointer(in), pointer(out), count, e, reduction(op, std::move(premul)),
                            pointer(stream));
      },
      Released());
  c.def(
      "reduce_scatter_blocks",
      [](Communicator& self, const Blocks& in, Address out, const Element& e, int op,
         std::shared_ptr<PreMulSum> premul, Address stream) {
        self.reduce_scatter(readable(in), pointer(out), e, reduction(op, std::move(premul)),
                            pointer(stream));
      },
      Released());
  c.def(
      "all_gather",
      [](Communicator& self, Address in, Address out, std::size_t count, const Element& e,
         Address stream) { self.all_gather(pointer(in), pointer(out), count, e, pointer(stream)); },
      Released());
  c.def(
      "all_gather_blocks",
      [](Communicator& self, Address in, const Blocks& out, const Element& e, Address stream) {
        self.all_gather(pointer(in), writable(out), e, pointer(stream));
      },
      Released());
  c.def(
      "all_to_all",
      [](Communicator& self, Address in, Address out, std::size_t count, const Element& e,
         Address stream) { self.all_to_all(pointer(in), pointer(out), count, e, pointer(stream)); },
      Released());
  c.def(
      "all_to_all_blocks",
      [](Communicator& self, const Blocks& in, const Blocks& out, const Element& e,
         Address stream) { self.all_to_all(readable(in), writable(out), e, pointer(stream)); },
      Released());
  c.def(
      "gather",
      [](Communicator& self, Address in, Address out, std::size_t count, const Element& e, int root,
         Address stream) {
        self.gather(pointer(in), pointer(out), count, e, root, pointer(stream));
      },
      Released());
  c.def(
      "gather_blocks",
      [](Communicator& self, std::pair<Address, std::size_t> in, const Blocks& out,
         const Element& e, int root, Address stream) {
        self.gather({pointer(in.first), in.second}, writable(out), e, root, pointer(stream));
      },
      Released());
  c.def(
      "scatter",
      [](Communicator& self, Address in, Address out, std::size_t count, const Element& e, int root,
         Address stream) {
        self.scatter(pointer(in), pointer(out), count, e, root, pointer(stream));
      },
      Released());
  c.def(
      "scatter_blocks",
      [](Communicator& self, const Blocks& in, std::pair<Address, std::size_t> out,
         const Element& e, int root, Address stream) {
        self.scatter(readable(in), {pointer(out.first), out.second}, e, root, pointer(stream));
      },
      Released());
  c.def(
      "send",
      [](Communicator& self, Address data, std::size_t count, const Element& e, int peer,
         Address stream) { self.send(pointer(data), count, e, peer, pointer(stream)); },
      Released());
  c.def(
      "recv",
      [](Communicator& self, Address data, std::size_t count, const Element& e, int peer,
         Address stream) { self.recv(pointer(data), count, e, peer, pointer(stream)); },
      Released());
}

void register_life(Class& c) {
  c.def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("device", &Communicator::device)
      .def_property_readonly("name", &Communicator::name)
      .def_property_readonly("blocking", &Communicator::blocking)
      .def_property_readonly("sequence", &Communicator::sequence)
      .def_property_readonly("failure", &Communicator::failure)
      .def_property_readonly("closed", &Communicator::closed)
      .def_property(
          "timeout", [](const Communicator& self) { return self.timeout().count() / 1e3; },
          [](Communicator& self, double seconds) { self.set_timeout(milliseconds(seconds)); })
      .def_property_readonly(
          "handle", [](Communicator& self) { return reinterpret_cast<Address>(self.handle()); })
      .def_property_readonly("library",
                             [](const Communicator& self) {
                               return std::const_pointer_cast<Library>(self.library_handle());
                             })
      .def("check_async", &Communicator::check_async, Released())
      .def(
          "close",
          [](Communicator& self, double timeout) {
            self.close(Deadline::after(milliseconds(timeout)));
          },
          py::arg("timeout"), Released())
      .def(
          "abort",
          [](Communicator& self, const std::string& why, double timeout) {
            return self.abort(why, Deadline::after(milliseconds(timeout)));
          },
          py::arg("why"), py::arg("timeout"), Released());
}

void register_memory(py::module_& m) {
  py::class_<PreMulSum, std::shared_ptr<PreMulSum>>(m, "PreMulSum")
      .def(py::init(&PreMulSum::make), py::arg("communicator"), py::arg("factor"),
           py::arg("element"), Released());
  py::class_<nccl::Memory>(m, "Memory")
      .def(py::init([](const std::shared_ptr<Library>& library, std::size_t bytes) {
             return std::make_unique<nccl::Memory>(library, bytes);
           }),
           py::arg("library"), py::arg("nbytes"), Released())
      .def_property_readonly(
          "pointer",
          [](const nccl::Memory& self) { return reinterpret_cast<Address>(self.data()); })
      .def_property_readonly("nbytes", &nccl::Memory::bytes)
      .def("free", &nccl::Memory::free, Released());
  py::class_<nccl::Registration>(m, "Registration")
      .def(py::init([](const std::shared_ptr<Communicator>& communicator, Address data,
                       std::size_t bytes) {
             return std::make_unique<nccl::Registration>(communicator, pointer(data), bytes);
           }),
           py::arg("communicator"), py::arg("pointer"), py::arg("nbytes"), Released())
      .def_property_readonly("open", &nccl::Registration::open)
      .def("close", &nccl::Registration::close, Released());
  py::class_<nccl::Window>(m, "Window")
      .def(py::init([](const std::shared_ptr<Communicator>& communicator, Address data,
                       std::size_t bytes, bool symmetric) {
             return std::make_unique<nccl::Window>(
                 communicator, pointer(data), bytes,
                 symmetric ? nccl::window_symmetric : nccl::window_default);
           }),
           py::arg("communicator"), py::arg("pointer"), py::arg("nbytes"), py::arg("symmetric"),
           Released())
      .def_property_readonly(
          "handle",
          [](const nccl::Window& self) { return reinterpret_cast<Address>(self.handle()); })
      .def_property_readonly("open", &nccl::Window::open)
      .def("close", &nccl::Window::close, Released());
}

}  // namespace

void register_nccl(py::module_& parent) {
  py::module_ m = parent.def_submodule("nccl", "NCCL found at run time.");
  py::register_exception_translator(&translate);
  m.def("set_error_classes", &set_error_classes);
  m.def("use_driver", &nccl::use_driver, py::arg("library"), "Takes a stand-in for libcuda.so.1.");
  m.def("dlpack", &describe_dlpack, py::arg("capsule"));
  m.def(
      "process_ends",
      [](double timeout) { nccl::process_ends(Deadline::after(milliseconds(timeout))); },
      py::arg("timeout"), Released());
  register_library(m);
  register_options(m);
  Class communicator(m, "Communicator");
  register_making(communicator);
  register_calls(communicator);
  register_life(communicator);
  register_memory(m);
  py::class_<PyGroup>(m, "Group")
      .def(py::init<>())
      .def("__enter__", &PyGroup::enter)
      .def("__exit__", [](PyGroup& self, const py::object& type, const py::object&,
                          const py::object&) { self.exit(type); });
  m.def("group_active", &nccl::Group::active);
}

}  // namespace pyparallel::python
