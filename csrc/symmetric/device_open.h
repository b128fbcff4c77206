// The steps that make a group's device memory shared: device_backing.cpp decides, these do.
#pragma once

#include <memory>
#include <string>

#include "symmetric/device_backing.h"

namespace pyparallel::symmetric {

// What the steps have in common.
struct DeviceGroup {
  shm::Communicator& group;
  const Peers& peers;
  const std::string where;
  const Layout& layout;
  const cuda::Device device;
  const Deadline deadline;
};

// Collective. This rank's memory and every peer's, mapped here. The device is current.
std::unique_ptr<DeviceResources> open_shared(const DeviceGroup& g, Share share);
// Collective. Adds a multicast object to what open_shared() gave; on failure it is as before.
void open_multicast(const DeviceGroup& g, Share share, DeviceResources* held);

}  // namespace pyparallel::symmetric
