#include "torch/nccl_module.h"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>

#include "base/error.h"
#include "torch/nccl_backend.h"

namespace py = pybind11;

namespace pyparallel::dist {
namespace {

// Waits for a stream of the stand-in library, at most so many milliseconds; 0: it is stuck.
using SettleHost = int (*)(void* handle, int milliseconds);
std::atomic<SettleHost> settle_host{nullptr};

void settle(void* handle) {
  if (settle_host.load()(handle, 60000) == 0) throw Timeout("the stand-in's stream is stuck");
}

constexpr StreamCalls host_calls{[](c10::Stream) -> void* { return nullptr; },
                                 [](c10::Stream) -> std::uint64_t { return 0; }, &settle};

}  // namespace

void register_nccl_backend(py::module_& m) {
  py::class_<NcclBackend, c10::intrusive_ptr<NcclBackend>, c10d::Backend>(m, "NcclBackend")
      .def_property_readonly("low_latency_notes", &NcclBackend::low_latency_notes,
                             "Why no call has low-latency kernels; empty where they are in use.");
  m.def(
      "_nccl_backend_on_host",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::string& group,
         std::chrono::milliseconds timeout, std::uintptr_t settle) {
        settle_host = reinterpret_cast<SettleHost>(settle);
        const py::gil_scoped_release no_gil;
        return c10::make_intrusive<NcclBackend>(Seat{store, rank, size, group, timeout},
                                                c10::DeviceType::CPU, host_calls);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("group"), py::arg("timeout"),
      py::arg("settle"),
      "The CUDA half on tensors in host memory, for tests with a stand-in for NCCL.");
}

}  // namespace pyparallel::dist
