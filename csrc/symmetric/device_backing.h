// Symmetric CUDA memory: one allocation per device, mapped by every rank of the group.
//
// How it is shared, best first, each step back with its reason in notes(): handles that travel as
// file descriptors, as fabric handles, CUDA IPC. On top of handles a multicast object where every
// device has it. One capability that lacks costs only itself.
//
// Order of a multicast object's life: all devices added before any memory is bound, all memory
// bound before any use; unbound before the memory goes.
//
// Destruction may come from a garbage collector while kernels still run, so the memory goes to a
// background thread that waits for the device and then unmaps: the destructor itself never waits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "symmetric/device_memory.h"
#include "symmetric/peers.h"
#include "symmetric/registry.h"
#include "symmetric/symmetric_memory.h"

namespace pyparallel::symmetric {

// What one rank holds. Members go in reverse order.
struct DeviceResources {
  cuda::MemoryHandle memory;    // this rank's, as a handle
  cuda::Allocation allocation;  // this rank's, when shared through CUDA IPC
  cuda::Mapping mapping;
  std::vector<cuda::Mapping> peers;  // of other ranks
  std::vector<cuda::IpcMapping> ipc_peers;
  cuda::MemoryHandle multicast;
  cuda::Binding binding;
  cuda::Mapping multicast_mapping;
  std::vector<std::byte*> blocks;  // by rank
};

class DeviceBacking : public Backing {
 public:
  // Local. Throws Unsupported (no driver, no device) or InvalidArgument (no such device).
  static void check(int ordinal);
  // Collective. Every rank throws the same class when one fails.
  static std::shared_ptr<DeviceBacking> open(shm::Communicator& group, const Peers& peers,
                                             std::uint64_t segment, std::size_t bytes,
                                             const Options& options, const std::string& name,
                                             Deadline deadline);
  ~DeviceBacking() override;

  std::byte* block(int rank) const override {
    return held_->blocks[static_cast<std::size_t>(rank)];
  }
  std::byte* multicast() const override {
    return reinterpret_cast<std::byte*>(held_->multicast_mapping.at());
  }
  int device() const override { return ordinal_; }
  const char* kind() const override { return name_of(share_); }
  std::string notes() const override { return notes_; }
  const Layout& layout() const override { return layout_; }
  std::uint64_t segment() const override { return segment_; }

  // Made by open().
  DeviceBacking(std::unique_ptr<DeviceResources> held, Share share, std::string notes, int ordinal,
                int rank, std::uint64_t segment, const Layout& layout);

 private:
  std::unique_ptr<DeviceResources> held_;
  const Share share_;
  const std::string notes_;
  const int ordinal_;
  const std::uint64_t segment_;
  const Layout layout_;
  const std::uint32_t fork_generation_;
  Registration registration_;
};

// Waits until all device memory whose owners are gone is unmapped. False when the deadline comes
// first.
bool drain_released_devices(Deadline deadline);

}  // namespace pyparallel::symmetric
