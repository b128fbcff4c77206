// One register function per room of the core; module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

namespace pyparallel::python {

void register_errors(pybind11::module_& m);   // errors.cpp: the first to be called
void register_machine(pybind11::module_& m);  // machine.cpp

// Weak: a build without the room's file is a build without the room.
[[gnu::weak]] void register_communicator(pybind11::module_& m);  // communicator.cpp
[[gnu::weak]] void register_cuda_kernels(pybind11::module_& m);  // cuda_kernels.cpp
[[gnu::weak]] void register_nccl(pybind11::module_& m);          // nccl.cpp
[[gnu::weak]] void register_symmetric(pybind11::module_& m);     // symmetric.cpp

}  // namespace pyparallel::python
