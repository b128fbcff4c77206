// pyparallel._torch.FastCalls: see fast_calls.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace pyparallel::dist {

void register_fast_calls(pybind11::module_& m);

}  // namespace pyparallel::dist
