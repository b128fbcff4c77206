// shm::Communicator as pyparallel._core.Communicator: addresses and counts in, nothing checked that
// the core checks itself. pyparallel/comm/communicator.py is the interface for people.
//
// The calls that move data bypass pybind11's argument conversion, which would cost as much as a
// small all-reduce itself: they are vectorcall methods added to the class, and take, in order, the
// parameters that their `fast` table entry lists. Addresses and counts are integers; `blocks` is
// one address (consecutive blocks, of the one count or of the counts of a list) or a list of
// addresses.
#include "shm/communicator.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/host_identity.h"
#include "python/arguments.h"
#include "python/capsule.h"
#include "python/fast_methods.h"
#include "python/rooms.h"

namespace py = pybind11;

namespace pyparallel::python {
namespace {

using shm::Block;
using shm::Communicator;
using shm::ConstBlock;
using shm::Reduction;
using shm::Work;

Deadline after_ms(std::int64_t timeout_ms) {
  return Deadline::after(std::chrono::milliseconds(timeout_ms));
}

// The last two arguments of a collective: its timeout, and whether it is only queued.
struct How {
  explicit How(Arguments& args) : timeout_ms(args.integer()), queued(args.flag()) {}
  std::int64_t timeout_ms;
  bool queued;
};

// Runs `call(Deadline)` here without the GIL, or on the worker, where the deadline counts from its
// start; then the result is its Work. Who queues keeps the communicator alive until it is done.
template <typename Call>
PyObject* run(Communicator& seat, const How& how, Call&& call) {
  if (!how.queued) {
    WithoutGil without_gil;
    call(after_ms(how.timeout_ms));
    return nullptr;
  }
  std::shared_ptr<Work> work;
  {
    WithoutGil without_gil;
    work = seat.enqueue([call = std::forward<Call>(call), timeout_ms = how.timeout_ms] {
      call(after_ms(timeout_ms));
    });
  }
  return py::cast(std::move(work)).release().ptr();
}

// --- the calls. A nullptr result stands for None.

PyObject* all_reduce(Communicator& seat, Arguments& args) {
  const void* in = args.address();
  void* out = args.address();
  const std::size_t count = args.count();
  const DType dtype = args.dtype();
  const Reduction reduction = args.reduction();
  return run(seat, How(args), [&seat, in, out, count, dtype, reduction](Deadline deadline) {
    seat.all_reduce(in, out, count, dtype, reduction, deadline);
  });
}

PyObject* reduce(Communicator& seat, Arguments& args) {
  const void* in = args.address();
  void* out = args.address();
  const std::size_t count = args.count();
  const DType dtype = args.dtype();
  const Reduction reduction = args.reduction();
  const int root = args.small();
  return run(seat, How(args), [&seat, in, out, count, dtype, reduction, root](Deadline deadline) {
    seat.reduce(in, out, count, dtype, reduction, root, deadline);
  });
}

PyObject* reduce_scatter(Communicator& seat, Arguments& args) {
  const DType dtype = args.dtype();
  auto in = args.blocks<ConstBlock>(seat.size(), dtype);
  void* out = args.address();
  const Reduction reduction = args.reduction();
  return run(seat, How(args),
             [&seat, in = std::move(in), out, dtype, reduction](Deadline deadline) {
               seat.reduce_scatter(in.data(), out, dtype, reduction, deadline);
             });
}

PyObject* all_gather(Communicator& seat, Arguments& args) {
  const DType dtype = args.dtype();
  const void* in = args.address();
  auto out = args.blocks<Block>(seat.size(), dtype);
  return run(seat, How(args), [&seat, in, out = std::move(out), dtype](Deadline deadline) {
    seat.all_gather(in, out.data(), dtype, deadline);
  });
}

PyObject* all_to_all(Communicator& seat, Arguments& args) {
  const DType dtype = args.dtype();
  auto in = args.blocks<ConstBlock>(seat.size(), dtype);
  auto out = args.blocks<Block>(seat.size(), dtype);
  return run(seat, How(args),
             [&seat, in = std::move(in), out = std::move(out), dtype](Deadline deadline) {
               seat.all_to_all(in.data(), out.data(), dtype, deadline);
             });
}

PyObject* broadcast(Communicator& seat, Arguments& args) {
  void* data = args.address();
  const std::size_t count = args.count();
  const DType dtype = args.dtype();
  const int root = args.small();
  return run(seat, How(args), [&seat, data, count, dtype, root](Deadline deadline) {
    seat.broadcast(data, count, dtype, root, deadline);
  });
}

PyObject* scatter(Communicator& seat, Arguments& args) {
  const DType dtype = args.dtype();
  const int root = args.small();
  auto in = args.blocks<ConstBlock>(root == seat.rank() ? seat.size() : 0, dtype);
  void* data = args.address();
  const Block out{data, args.count()};
  return run(seat, How(args), [&seat, in = std::move(in), out, dtype, root](Deadline deadline) {
    seat.scatter(in.data(), out, dtype, root, deadline);
  });
}

PyObject* gather(Communicator& seat, Arguments& args) {
  const DType dtype = args.dtype();
  const int root = args.small();
  const void* data = args.address();
  const ConstBlock in{data, args.count()};
  auto out = args.blocks<Block>(root == seat.rank() ? seat.size() : 0, dtype);
  return run(seat, How(args), [&seat, in, out = std::move(out), dtype, root](Deadline deadline) {
    seat.gather(in, out.data(), dtype, root, deadline);
  });
}

PyObject* barrier(Communicator& seat, Arguments& args) {
  return run(seat, How(args), [&seat](Deadline deadline) { seat.barrier(deadline); });
}

// What all four messages begin with.
struct Message {
  explicit Message(Arguments& args)
      : data(args.address()),
        count(args.count()),
        dtype(args.dtype()),
        peer(args.small()),
        tag(args.integer()) {}
  void* data;
  std::size_t count;
  DType dtype;
  int peer;
  std::int64_t tag;
};

PyObject* send(Communicator& seat, Arguments& args) {
  const Message m(args);
  const Deadline deadline = after_ms(args.integer());
  WithoutGil without_gil;
  seat.send(m.data, m.count, m.dtype, m.peer, m.tag, deadline);
  return nullptr;
}

PyObject* recv(Communicator& seat, Arguments& args) {
  const Message m(args);
  const Deadline deadline = after_ms(args.integer());
  int source = 0;
  {
    WithoutGil without_gil;
    source = seat.recv(m.data, m.count, m.dtype, m.peer, m.tag, deadline);
  }
  return PyLong_FromLong(source);
}

PyObject* isend(Communicator& seat, Arguments& args) {
  const Message m(args);
  std::shared_ptr<Work> work;
  {
    WithoutGil without_gil;
    work = seat.isend(m.data, m.count, m.dtype, m.peer, m.tag);
  }
  return py::cast(std::move(work)).release().ptr();
}

PyObject* irecv(Communicator& seat, Arguments& args) {
  const Message m(args);
  std::shared_ptr<Work> work;
  {
    WithoutGil without_gil;
    work = seat.irecv(m.data, m.count, m.dtype, m.peer, m.tag);
  }
  return py::cast(std::move(work)).release().ptr();
}

// --- from a call above to a method of the class

using Body = PyObject* (*)(Communicator&, Arguments&);

template <Body body, Py_ssize_t expected>
PyObject* counted(Communicator& seat, PyObject* const* values, Py_ssize_t given) {
  Arguments args("a communicator's method", values, given, expected);
  return body(seat, args);
}

template <Body body, Py_ssize_t expected>
PyMethodDef fast(const char* name, const char* parameters) {
  return fast_method<Communicator, &counted<body, expected>>(name, parameters);
}

void add_calls(py::handle cls) {
  static PyMethodDef methods[] = {
      fast<all_reduce, 8>("all_reduce", "in, out, count, dtype, op, factor, timeout_ms, queued"),
      fast<reduce, 9>("reduce", "in, out, count, dtype, op, factor, root, timeout_ms, queued"),
      fast<reduce_scatter, 8>("reduce_scatter",
                              "dtype, in blocks, counts, out, op, factor, timeout_ms, queued"),
      fast<all_gather, 6>("all_gather", "dtype, in, out blocks, counts, timeout_ms, queued"),
      fast<all_to_all, 7>("all_to_all",
                          "dtype, in blocks, counts, out blocks, counts, timeout_ms, queued"),
      fast<broadcast, 6>("broadcast", "data, count, dtype, root, timeout_ms, queued"),
      fast<scatter, 8>("scatter", "dtype, root, in blocks, counts, out, count, timeout_ms, queued"),
      fast<gather, 8>("gather", "dtype, root, in, count, out blocks, counts, timeout_ms, queued"),
      fast<barrier, 2>("barrier", "timeout_ms, queued"),
      fast<send, 6>("send", "data, count, dtype, destination, tag, timeout_ms"),
      fast<recv, 6>("recv", "data, count, dtype, source, tag, timeout_ms; gives the source"),
      fast<isend, 5>("isend", "data, count, dtype, destination, tag; gives its Work"),
      fast<irecv, 5>("irecv", "data, count, dtype, source, tag; gives its Work"),
  };
  add_fast_methods(cls, methods);
}

// --- life

shm::UniqueId id_from(const py::bytes& bytes) {
  const std::string_view text = bytes;
  PYPARALLEL_REQUIRE(text.size() == shm::UniqueId::size, "a unique id has ", shm::UniqueId::size,
                     " bytes, got ", text.size());
  shm::UniqueId id;
  std::memcpy(id.bytes.data(), text.data(), text.size());
  return id;
}

py::bytes random_id() {
  const shm::UniqueId id = shm::UniqueId::random();
  return py::bytes(reinterpret_cast<const char*>(id.bytes.data()), id.bytes.size());
}

shm::Options options(std::string name, std::int64_t timeout_ms) {
  return shm::Options{std::move(name), std::chrono::milliseconds(timeout_ms)};
}

std::shared_ptr<Communicator> join(const py::bytes& id, int rank, int size, std::string name,
                                   std::int64_t timeout_ms) {
  const shm::UniqueId key = id_from(id);
  py::gil_scoped_release without_gil;
  return Communicator::join(key, rank, size, options(std::move(name), timeout_ms));
}

// Runs a Python function on the worker. The function is released there, under the GIL; when the
// interpreter has already gone it is left alone.
std::shared_ptr<Work> enqueue(Communicator& seat, py::function call) {
  std::shared_ptr<PyObject> held(call.release().ptr(), [](PyObject* object) {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(object);
  });
  py::gil_scoped_release without_gil;
  return seat.enqueue([held = std::move(held)] {
    py::gil_scoped_acquire gil;
    py::handle(held.get())();
  });
}

}  // namespace

void register_communicator(py::module_& m) {
  using without_gil = py::call_guard<py::gil_scoped_release>;
  m.def("host_identity", &host_identity, "Equal for processes that can share memory.");

  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def("done", &Work::done)
      .def("source", &Work::source)
      .def(
          "wait", [](Work& work, std::int64_t ms) { work.wait(after_ms(ms)); },
          py::arg("timeout_ms"), without_gil());

  py::class_<Communicator, std::shared_ptr<Communicator>> cls(m, "Communicator");
  cls.def_static("random_id", &random_id)
      .def_static("join", &join, py::arg("id"), py::arg("rank"), py::arg("size"), py::arg("name"),
                  py::arg("timeout_ms"))
      .def_static("from_capsule", &from_capsule, py::arg("capsule"))
      .def("to_capsule", &to_capsule)
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("name", &Communicator::name)
      .def_property_readonly("sequence", &Communicator::sequence)
      .def_property(
          "timeout_ms", [](const Communicator& seat) { return seat.timeout().count(); },
          [](Communicator& seat, std::int64_t ms) {
            seat.set_timeout(std::chrono::milliseconds(ms));
          })
      .def("note", &Communicator::note, py::arg("text"))
      .def("refuse", &Communicator::refuse, py::arg("op"), py::arg("why"), without_gil())
      .def("enqueue", &enqueue, py::arg("call"))
      .def(
          "split",
          [](Communicator& seat, int color, int key, std::string name, std::int64_t timeout_ms) {
            return seat.split(color, key, options(std::move(name), timeout_ms));
          },
          py::arg("color"), py::arg("key"), py::arg("name"), py::arg("timeout_ms"), without_gil())
      .def("abort", &Communicator::abort, py::arg("why"), without_gil())
      .def("close", &Communicator::close, without_gil())
      .def("failure", &Communicator::failure)
      .def("pid_of", &Communicator::pid_of, py::arg("rank"));
  add_calls(cls);
}

}  // namespace pyparallel::python
