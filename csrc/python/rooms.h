// One register function per room of the core; module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

namespace pyparallel::python {

void register_errors(pybind11::module_& m);        // errors.cpp: the first to be called
void register_announced(pybind11::module_& m);     // announced.cpp
void register_machine(pybind11::module_& m);       // machine.cpp
void register_communicator(pybind11::module_& m);  // communicator.cpp
void register_cuda_kernels(pybind11::module_& m);  // cuda_kernels.cpp
void register_nccl(pybind11::module_& m);          // nccl.cpp
void register_symmetric(pybind11::module_& m);     // symmetric.cpp

}  // namespace pyparallel::python
