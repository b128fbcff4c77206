// What the core found of this machine: for `python -m pyparallel doctor` and for tests.
#include "cuda/loader.h"
#include "python/rooms.h"
#include "shm/reduce.h"

namespace pyparallel::python {

void register_machine(pybind11::module_& m) {
  m.def("simd_name", &shm::simd_name, "Instruction set of CPU reductions: avx512, avx2, portable.");
  m.def("cuda_kernels_unavailable", &cuda::Kernels::unavailable,
        pybind11::call_guard<pybind11::gil_scoped_release>(),
        "Empty where the CUDA kernels can run on the current device, else why not.");
}

}  // namespace pyparallel::python
