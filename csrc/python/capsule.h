// A communicator as a PyCapsule: how it travels between extension modules, which do not share
// pybind11's types (_torch is built with torch's own copy).
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "shm/communicator.h"

namespace pyparallel::python {

constexpr const char* communicator_capsule = "pyparallel.Communicator";

inline pybind11::object to_capsule(const std::shared_ptr<shm::Communicator>& seat) {
  using Owner = std::shared_ptr<shm::Communicator>;
  auto owner = std::make_unique<Owner>(seat);
  PyObject* capsule = PyCapsule_New(owner.get(), communicator_capsule, [](PyObject* dying) {
    delete static_cast<Owner*>(PyCapsule_GetPointer(dying, communicator_capsule));
  });
  if (capsule == nullptr) throw pybind11::error_already_set();
  owner.release();
  return pybind11::reinterpret_steal<pybind11::object>(capsule);
}

// Shares the communicator; the capsule keeps its own part.
inline std::shared_ptr<shm::Communicator> from_capsule(const pybind11::object& capsule) {
  void* owner = PyCapsule_GetPointer(capsule.ptr(), communicator_capsule);
  if (owner == nullptr) throw pybind11::error_already_set();
  return *static_cast<std::shared_ptr<shm::Communicator>*>(owner);
}

}  // namespace pyparallel::python
