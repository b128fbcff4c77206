// Communicators, reductions and groups of pyparallel._core.nccl.
#include <optional>
#include <tuple>
#include <utility>

#include "nccl/communicator.h"
#include "nccl/group.h"
#include "nccl/memory.h"
#include "python/nccl_room.h"

namespace py = pybind11;

namespace pyparallel::python {
namespace {

using nccl::Communicator;
using nccl::Element;
using nccl::Library;
using nccl::PreMulSum;
using nccl::UniqueId;
// Address and count of each rank's block.
using Blocks = std::vector<std::pair<Address, std::size_t>>;

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

struct PyGroup {
  std::optional<nccl::Group> group;
  struct Leave {
    std::optional<nccl::Group>& group;
    ~Leave() { group.reset(); }
  };

  void enter() {
    PYPARALLEL_REQUIRE(!group.has_value(), "this group is in use; each `with` needs its own");
    group.emplace();
  }
  void exit(const py::object& error) {
    const Leave leave{group};
    if (!error.is_none()) return;
    const py::gil_scoped_release released;
    group->run();
  }
  float simulate() {
    PYPARALLEL_REQUIRE(group.has_value(), "this group is not in use");
    const Leave leave{group};
    return group->simulate();
  }
};

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
      "init_all",
      [](const std::shared_ptr<Library>& library, const std::vector<int>& devices,
         const nccl::Options& options) {
        return Communicator::init_all(library, devices, options);
      },
      py::arg("library"), py::arg("devices"), py::arg("options"), Released());
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
    return id_bytes(id);
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
      "bcast",
      [](Communicator& self, Address data, std::size_t count, const Element& e, int root,
         Address stream) { self.bcast(pointer(data), count, e, root, pointer(stream)); },
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

void register_one_sided(Class& c) {
  c.def(
      "put_signal",
      [](Communicator& self, Address data, std::size_t count, const Element& e, int peer,
         const nccl::Window& window, std::size_t offset, int signal, int context, Address stream) {
        self.put_signal(pointer(data), count, e, peer, window, offset, signal, context,
                        pointer(stream));
      },
      Released());
  c.def(
      "signal",
      [](Communicator& self, int peer, int signal, int context, Address stream) {
        self.signal(peer, signal, context, pointer(stream));
      },
      Released());
  c.def(
      "wait_signals",
      [](Communicator& self, const std::vector<std::tuple<int, int, int, int>>& waits,
         Address stream) {
        std::vector<nccl::WaitSignalRecord> records;
        for (const auto& [count, peer, signal, context] : waits)
          records.push_back({count, peer, signal, context});
        self.wait_signals(records, pointer(stream));
      },
      py::arg("waits"), py::arg("stream"), Released());
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
      .def("revoke", &Communicator::revoke, Released())
      .def_property_readonly("revoked", &Communicator::revoked)
      .def("suspend", &Communicator::suspend, Released())
      .def("resume", &Communicator::resume, Released())
      .def("memory_stats",
           [](Communicator& self) {
             nccl::MemoryStats stats;
             {
               const py::gil_scoped_release released;
               stats = self.memory_stats();
             }
             return py::make_tuple(stats.suspendable, stats.persistent, stats.total,
                                   stats.suspended);
           })
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

}  // namespace

void register_nccl_communicator(py::module_& m) {
  Class communicator(m, "Communicator");
  register_making(communicator);
  register_calls(communicator);
  register_one_sided(communicator);
  register_life(communicator);
  py::class_<PreMulSum, std::shared_ptr<PreMulSum>>(m, "PreMulSum")
      .def(py::init(&PreMulSum::make), py::arg("communicator"), py::arg("factor"),
           py::arg("element"), Released());
  py::class_<PyGroup>(m, "Group")
      .def(py::init<>())
      .def("__enter__", &PyGroup::enter)
      .def("__exit__", [](PyGroup& self, const py::object& type, const py::object&,
                          const py::object&) { self.exit(type); })
      .def("simulate", &PyGroup::simulate, Released());
  m.def("group_active", &nccl::Group::active);
}

}  // namespace pyparallel::python
