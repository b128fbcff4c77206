// pyparallel._torch: the backend as torch.distributed gets it. Registered with torch by
// pyparallel/comm/torch_backend.py.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "python/capsule.h"
#include "python/rooms.h"
#include "torch/attention.h"
#include "torch/backend.h"
#include "torch/fast_calls.h"
#include "torch/few_rows.h"
#include "torch/group.h"
#include "torch/nccl_module.h"
#include "torch/profiling.h"

namespace py = pybind11;

namespace pyparallel::dist {
namespace {

// `make` is called with (store, rank, size, timeout in seconds) and gives torch's ProcessGroupGloo.
GlooFactory gloo_factory(py::object make) {
  // Destroyed wherever the last group is, perhaps on a thread without the GIL.
  const std::shared_ptr<py::object> shared(new py::object(std::move(make)), [](py::object* object) {
    if (Py_IsInitialized() == 0) return;  // the interpreter took the object with it
    const py::gil_scoped_acquire gil;
    delete object;
  });
  return [shared](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                  std::chrono::milliseconds timeout) {
    const py::gil_scoped_acquire gil;
    const double seconds = std::chrono::duration<double>(timeout).count();
    return (*shared)(store, rank, size, seconds).cast<c10::intrusive_ptr<c10d::Backend>>();
  };
}

}  // namespace
}  // namespace pyparallel::dist

PYBIND11_MODULE(_torch, m) {
  namespace dist = pyparallel::dist;
  m.doc() = "torch.distributed backend of pyparallel.";
  pyparallel::python::register_errors(m);
  pybind11::class_<dist::GroupOptions, c10::intrusive_ptr<dist::GroupOptions>,
                   c10d::Backend::Options>(m, "GroupOptions")
      .def("__deepcopy__", [](const dist::GroupOptions& self, const pybind11::dict&) {
        return c10::make_intrusive<dist::GroupOptions>(self);
      });
  pybind11::class_<dist::Backend, c10::intrusive_ptr<dist::Backend>, c10d::Backend>(m, "Backend")
      .def_property_readonly("options", &dist::Backend::getBackendOptions,
                             "The timeout and the names that the group was made with.")
      .def(
          "to_capsule",
          [](const dist::Backend& self) {
            return pyparallel::python::to_capsule(self.communicator());
          },
          "The group's communicator, for _core.Communicator.from_capsule: shared, not a copy.")
      .def("_abandon_coalescing", &dist::Backend::abandon_coalescing, py::arg("op"), py::arg("why"),
           py::call_guard<py::gil_scoped_release>(),
           "Ends a batch of calls in which something raised.");
  m.def(
      "create_backend",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::string& group,
         std::chrono::milliseconds timeout, py::object make_gloo) {
        const dist::GlooFactory gloo = dist::gloo_factory(std::move(make_gloo));
        const py::gil_scoped_release no_gil;
        return dist::Backend::create({store, rank, size, group, timeout}, gloo);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("group"), py::arg("timeout"),
      py::arg("make_gloo"),
      "Collective over the ranks of one group: the c10d backend of this rank.");
  m.def(
      "join",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::string& group,
         std::chrono::milliseconds timeout, py::object make_gloo) {
        const dist::GlooFactory gloo = dist::gloo_factory(std::move(make_gloo));
        std::shared_ptr<pyparallel::shm::Communicator> seat;
        {
          const py::gil_scoped_release no_gil;
          seat = dist::open_group({store, rank, size, group, timeout}, gloo);
        }
        return pyparallel::python::to_capsule(seat);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("group"), py::arg("timeout"),
      py::arg("make_gloo"),
      "Collective over the ranks of one group, on any number of hosts: a capsule for "
      "_core.Communicator.from_capsule.");
  dist::show_calls_to_profilers();
  dist::register_attention(m);
  dist::register_fast_calls(m);
  dist::register_few_rows(m);
  dist::register_nccl_backend(m);
  m.def("has_cuda", &dist::has_cuda_backend, "Whether this build can serve CUDA tensors.");
}
