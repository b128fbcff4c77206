// csrc/cuda as pyparallel._core.CudaSeat and cuda_choose: addresses, counts and codes.
// pyparallel/comm/cuda_kernels.py is the interface for people.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "cuda/choice.h"
#include "cuda/loader.h"
#include "python/rooms.h"

namespace py = pybind11;

namespace pyparallel::python {
namespace {

using cuda::WorkspaceLayout;
using without_gil = py::call_guard<py::gil_scoped_release>;

template <typename Enum>
Enum checked(const char* what, int code) {
  PYPARALLEL_REQUIRE(code >= 0 && code < static_cast<int>(Enum::count_), "unknown ", what, " ",
                     code);
  return static_cast<Enum>(code);
}

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

cuda::Seat seat_of(int rank, const std::vector<std::uintptr_t>& peers,
                   const WorkspaceLayout& layout, std::uintptr_t status, std::uintptr_t multicast) {
  if (const std::string why = cuda::layout_misfit(layout); !why.empty()) throw InvalidArgument(why);
  PYPARALLEL_REQUIRE(peers.size() == layout.world, peers.size(), " workspace addresses for ",
                     layout.world, " ranks");
  cuda::Seat seat;
  for (std::size_t r = 0; r < peers.size(); ++r) seat.peers[r] = pointer(peers[r]);
  seat.multicast = pointer(multicast);
  seat.status = static_cast<cuda::StatusPage*>(pointer(status));
  seat.layout = layout;
  seat.rank = rank;
  return seat;
}

void launch(const cuda::Seat& seat, int op, int dtype, std::uintptr_t in, std::uintptr_t out,
            std::uint64_t count, int blocks, int threads, std::uint32_t index, int peer,
            std::uint64_t timeout_ns, std::uintptr_t stream) {
  cuda::Request request;
  request.op = checked<cuda::Op>("op", op);
  request.dtype = checked<DType>("dtype", dtype);
  request.in = pointer(in);
  request.out = pointer(out);
  request.count = count;
  request.grid = {blocks, threads};
  request.index = index;
  request.peer = peer;
  request.timeout_ns = timeout_ns;
  cuda::Kernels::get().launch(request, seat, pointer(stream));
}

py::dict as_dict(const cuda::Candidate& c) {
  py::dict d;
  d["name"] = c.name();
  d["nccl"] = c.nccl;
  d["op"] = static_cast<int>(c.op);
  d["predicted_us"] = c.predicted_us;
  d["excluded"] = c.excluded;
  return d;
}

py::dict choose(int collective, int dtype, std::uint64_t count, const WorkspaceLayout& layout,
                bool multicast, bool rank_order, bool nccl) {
  PYPARALLEL_REQUIRE(collective >= 0 && collective <= 2, "unknown collective ", collective);
  cuda::Problem problem;
  problem.collective = static_cast<cuda::Collective>(collective);
  problem.dtype = checked<DType>("dtype", dtype);
  problem.count = count;
  problem.layout = layout;
  problem.multicast = multicast;
  problem.rank_order = rank_order;
  problem.nccl = nccl;
  const cuda::Choice choice = cuda::choose(problem);
  py::dict d = as_dict(choice.candidate);
  d["blocks"] = choice.grid.blocks;
  d["threads"] = choice.grid.threads;
  d["reason"] = choice.reason;
  py::list all;
  for (const cuda::Candidate& c : choice.candidates) all.append(as_dict(c));
  d["candidates"] = all;
  return d;
}

}  // namespace

void register_cuda_kernels(py::module_& m) {
  py::class_<WorkspaceLayout>(m, "CudaWorkspaceLayout")
      .def(py::init([](std::uint32_t world, std::uint32_t max_blocks, std::uint32_t signals,
                       std::uint64_t slot_bytes) {
             const WorkspaceLayout layout{world, max_blocks, signals, slot_bytes};
             const std::string why = cuda::layout_misfit(layout);
             if (!why.empty()) throw InvalidArgument(why);
             return layout;
           }),
           py::arg("world"), py::arg("max_blocks"), py::arg("signals"), py::arg("slot_bytes"))
      .def_readonly("world", &WorkspaceLayout::world)
      .def_readonly("max_blocks", &WorkspaceLayout::max_blocks)
      .def_readonly("signals", &WorkspaceLayout::signals)
      .def_readonly("slot_bytes", &WorkspaceLayout::slot_bytes)
      .def_property_readonly("bytes", &WorkspaceLayout::bytes);
  py::class_<cuda::Seat>(m, "CudaSeat")
      .def(py::init(&seat_of), py::arg("rank"), py::arg("peers"), py::arg("layout"),
           py::arg("status"), py::arg("multicast"))
      .def("launch", &launch, py::arg("op"), py::arg("dtype"), py::arg("input"), py::arg("output"),
           py::arg("count"), py::arg("blocks"), py::arg("threads"), py::arg("index"),
           py::arg("peer"), py::arg("timeout_ns"), py::arg("stream"), without_gil())
      .def(
          "raise_failure",
          [](const cuda::Seat& seat, const std::string& group) {
            cuda::raise_failure(*seat.status, group);
          },
          py::arg("group"))
      .def("abort", [](const cuda::Seat& seat) { cuda::request_abort(*seat.status); });
  m.attr("CUDA_STATUS_BYTES") = sizeof(cuda::StatusPage);
  m.attr("CUDA_WORKSPACE_ALIGNMENT") = cuda::kLine;
  m.def("cuda_prepare", [] { cuda::Kernels::get().prepare(); }, without_gil());
  m.def("cuda_choose", &choose, py::arg("collective"), py::arg("dtype"), py::arg("count"),
        py::arg("layout"), py::arg("multicast"), py::arg("rank_order"), py::arg("nccl"));
}

}  // namespace pyparallel::python
