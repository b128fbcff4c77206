// What a DLPack capsule says of its array, without taking it over: the capsule stays its owner.
#pragma once

#include <pybind11/pybind11.h>

namespace pyparallel::python {

// (address, shape, contiguous, type code, bits, lanes, device type, device id, read-only)
pybind11::tuple describe_dlpack(const pybind11::capsule& capsule);

}  // namespace pyparallel::python
