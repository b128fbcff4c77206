// The CUDA half as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

namespace pyparallel::dist {

void register_nccl_backend(pybind11::module_& m);

}  // namespace pyparallel::dist
