// DLPack capsules: what one says of its array, and memory of the core as one.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>

namespace pyparallel::python {

// Without taking the array over, the capsule stays its owner:
// (address, shape, contiguous, type code, bits, lanes, device type, device id, read-only)
pybind11::tuple describe_dlpack(const pybind11::capsule& capsule);

// [data, data + bytes) as one-dimensional uint8, on the CPU where cuda_device is -1. `owner` is
// dropped with the last tensor made of it, from any thread and without the interpreter's lock.
pybind11::capsule to_dlpack(void* data, std::size_t bytes, int cuda_device,
                            std::shared_ptr<void> owner);

}  // namespace pyparallel::python
