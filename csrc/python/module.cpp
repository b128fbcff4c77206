// pyparallel._core: the core as Python sees it. Each room registers itself in its own file.
#include <pybind11/pybind11.h>

#include "python/rooms.h"

PYBIND11_MODULE(_core, m) {
  namespace python = pyparallel::python;
  m.doc() = "Native core of pyparallel.";
  python::register_errors(m);
  python::register_announced(m);
  python::register_machine(m);
  python::register_communicator(m);
  python::register_cuda_kernels(m);
  python::register_nccl(m);
  python::register_symmetric(m);
}
