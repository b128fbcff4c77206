// symmetric::SymmetricMemory as pyparallel._core.SymmetricMemory: offsets and addresses.
// pyparallel/comm/symmetric_memory.py is the interface for people.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "python/dlpack.h"
#include "python/rooms.h"
#include "symmetric/device_backing.h"
#include "symmetric/registry.h"
#include "symmetric/symmetric_memory.h"

namespace py = pybind11;

namespace pyparallel::python {
namespace {

using symmetric::SymmetricMemory;
using without_gil = py::call_guard<py::gil_scoped_release>;

std::uintptr_t number(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

Deadline after_ms(std::int64_t timeout_ms) {
  return Deadline::after(std::chrono::milliseconds(timeout_ms));
}

std::shared_ptr<SymmetricMemory> create(shm::Communicator& group, std::size_t bytes,
                                        std::string name, int device, int channels, bool multicast,
                                        std::int64_t timeout_ms) {
  symmetric::Options options;
  options.name = std::move(name);
  options.device = device;
  options.channels = channels;
  options.multicast = multicast;
  options.timeout = std::chrono::milliseconds(timeout_ms);
  return SymmetricMemory::create(group, bytes, options);
}

py::capsule view(const SymmetricMemory& memory, int rank, std::size_t offset, std::size_t bytes) {
  const std::size_t size = memory.layout().bytes;
  PYPARALLEL_REQUIRE(offset <= size && bytes <= size - offset, "symmetric memory of group ",
                     memory.name(), ": [", offset, ", ", offset, " + ", bytes,
                     ") is outside the data's ", size, " bytes");
  return to_dlpack(memory.data(rank) + offset, bytes, memory.backing()->device(), memory.backing());
}

py::capsule signal_view(const SymmetricMemory& memory, int rank) {
  const symmetric::Layout& layout = memory.layout();
  // The seat line, which comes last, is not the caller's.
  const std::size_t bytes =
      (symmetric::Layout::signal_lines(layout.size, layout.channels) - 1) * symmetric::kLine;
  return to_dlpack(memory.signal_page(rank), bytes, memory.backing()->device(), memory.backing());
}

// (segment, rank, size, device, offset, bytes to the end, bases, multicast), or None.
py::object find(std::uintptr_t address, std::size_t bytes) {
  symmetric::SymmetricRange range;
  if (!symmetric::find(reinterpret_cast<const void*>(address), bytes, &range)) return py::none();
  py::list bases;
  for (int r = 0; r < range.size; ++r) bases.append(number(range.bases[r]));
  return py::make_tuple(range.segment, range.rank, range.size, range.device, range.offset,
                        range.bytes, bases, number(range.multicast));
}

}  // namespace

void register_symmetric(py::module_& m) {
  py::class_<SymmetricMemory, std::shared_ptr<SymmetricMemory>>(m, "SymmetricMemory")
      .def_static("create", &create, py::arg("group"), py::arg("bytes"), py::arg("name"),
                  py::arg("device"), py::arg("channels"), py::arg("multicast"),
                  py::arg("timeout_ms"), without_gil())
      .def_property_readonly("rank", &SymmetricMemory::rank)
      .def_property_readonly("size", &SymmetricMemory::size)
      .def_property_readonly("name", &SymmetricMemory::name)
      .def_property_readonly("generation", &SymmetricMemory::generation)
      .def_property_readonly("bytes", [](const SymmetricMemory& m) { return m.layout().bytes; })
      .def_property_readonly("channels",
                             [](const SymmetricMemory& m) { return m.layout().channels; })
      .def_property_readonly("granularity",
                             [](const SymmetricMemory& m) { return m.layout().granularity; })
      .def_property_readonly("used", &SymmetricMemory::used)
      .def_property_readonly("device",
                             [](const SymmetricMemory& m) { return m.backing()->device(); })
      .def_property_readonly("kind", [](const SymmetricMemory& m) { return m.backing()->kind(); })
      .def_property_readonly("notes", [](const SymmetricMemory& m) { return m.backing()->notes(); })
      .def_property_readonly("segment",
                             [](const SymmetricMemory& m) { return m.backing()->segment(); })
      .def_property_readonly(
          "multicast", [](const SymmetricMemory& m) { return number(m.backing()->multicast()); })
      .def(
          "data", [](const SymmetricMemory& m, int rank) { return number(m.data(rank)); },
          py::arg("rank"))
      .def(
          "signal_page",
          [](const SymmetricMemory& m, int rank) { return number(m.signal_page(rank)); },
          py::arg("rank"))
      .def("view", &view, py::arg("rank"), py::arg("offset"), py::arg("bytes"))
      .def("signal_view", &signal_view, py::arg("rank"))
      .def(
          "allocate",
          [](SymmetricMemory& m, std::size_t bytes, std::size_t alignment,
             std::int64_t timeout_ms) {
            return m.allocate(bytes, alignment, after_ms(timeout_ms));
          },
          py::arg("bytes"), py::arg("alignment"), py::arg("timeout_ms"), without_gil())
      .def(
          "release",
          [](SymmetricMemory& m, std::size_t offset, std::int64_t timeout_ms) {
            m.release(offset, after_ms(timeout_ms));
          },
          py::arg("offset"), py::arg("timeout_ms"), without_gil())
      .def(
          "barrier",
          [](SymmetricMemory& m, std::int64_t timeout_ms) { m.barrier(after_ms(timeout_ms)); },
          py::arg("timeout_ms"), without_gil())
      .def("put_signal", &SymmetricMemory::put_signal, py::arg("peer"), py::arg("channel"))
      .def(
          "wait_signal",
          [](SymmetricMemory& m, int source, int channel, std::int64_t timeout_ms) {
            m.wait_signal(source, channel, after_ms(timeout_ms));
          },
          py::arg("source"), py::arg("channel"), py::arg("timeout_ms"), without_gil())
      .def("refuse", &SymmetricMemory::refuse, py::arg("op"), py::arg("why"), without_gil())
      .def("abort", &SymmetricMemory::abort, py::arg("why"), without_gil())
      .def("close", &SymmetricMemory::close, without_gil())
      .def_property_readonly("closed", &SymmetricMemory::closed)
      .def("failure", &SymmetricMemory::failure);

  m.def(
      "symmetric_find", &find, py::arg("address"), py::arg("bytes"),
      "(segment, rank, size, device, offset, bytes to the end, bases, multicast) of an address in "
      "symmetric memory, or None.");
  m.def("symmetric_registered", &symmetric::registered, "How many regions are registered.");
  m.def("cuda_driver_unavailable", &symmetric::cuda::Driver::unavailable,
        "Empty where the CUDA driver can be used, else why not.");
  m.def(
      "drain_released_devices",
      [](std::int64_t timeout_ms) {
        return symmetric::drain_released_devices(after_ms(timeout_ms));
      },
      py::arg("timeout_ms"), without_gil(),
      "Waits until dropped CUDA symmetric memory is unmapped; False when it takes too long.");
}

}  // namespace pyparallel::python
