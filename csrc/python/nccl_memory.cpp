// Memory that NCCL can use without copies, of pyparallel._core.nccl.
#include <memory>

#include "nccl/memory.h"
#include "python/nccl_room.h"

namespace py = pybind11;

namespace pyparallel::python {

using nccl::Communicator;
using nccl::Library;

void register_nccl_memory(py::module_& m) {
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

}  // namespace pyparallel::python
