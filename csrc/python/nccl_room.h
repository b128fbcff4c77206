// What the files of pyparallel._core.nccl share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <string_view>

#include "base/error.h"
#include "nccl/abi.h"

namespace pyparallel::python {

using Address = std::uintptr_t;
using Released = pybind11::call_guard<pybind11::gil_scoped_release>;

template <typename T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

inline std::chrono::milliseconds milliseconds(double seconds) {
  PYPARALLEL_REQUIRE(seconds > 0 && seconds < 1e12, "a timeout of ", seconds, " s");
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3 + 0.999));
}

inline nccl::UniqueId id_from(const pybind11::bytes& bytes) {
  const std::string_view view = bytes;
  PYPARALLEL_REQUIRE(view.size() == nccl::UniqueId::size, "a unique id has ", nccl::UniqueId::size,
                     " bytes, got ", view.size());
  nccl::UniqueId id{};
  view.copy(id.bytes, nccl::UniqueId::size);
  return id;
}

inline pybind11::bytes id_bytes(const nccl::UniqueId& id) {
  return pybind11::bytes(id.bytes, nccl::UniqueId::size);
}

// nccl_communicator.cpp: Communicator, PreMulSum, Group. nccl_memory.cpp: Memory and what is
// registered.
void register_nccl_communicator(pybind11::module_& m);
void register_nccl_memory(pybind11::module_& m);

}  // namespace pyparallel::python
