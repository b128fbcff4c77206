#include "symmetric/device_open.h"

#include <unistd.h>

#include "symmetric/agreement.h"
#include "symmetric/fd_exchange.h"

namespace pyparallel::symmetric {
namespace {

using cuda::Address;
using cuda::FabricHandle;
using cuda::Handle;
using cuda::IpcHandle;
using cuda::MemoryHandle;

std::byte* pointer(Address at) { return reinterpret_cast<std::byte*>(at); }

int handle_type(Share share) {
  return share == Share::fabric ? cuda::kHandleFabric : cuda::kHandlePosixFd;
}

void clear(Address at, std::size_t bytes) {
  PYPARALLEL_CUDA(cuMemsetD8_v2(at, 0, bytes));
  PYPARALLEL_CUDA(cuCtxSynchronize());
}

// A handle on its way to other processes: a descriptor, or bytes.
struct Exported {
  UniqueFd fd;
  FabricHandle fabric{};
};

Exported exported(const MemoryHandle& memory, Share share) {
  Exported out;
  if (share == Share::fabric) {
    PYPARALLEL_CUDA(
        cuMemExportToShareableHandle(&out.fabric, memory.get(), cuda::kHandleFabric, 0));
  } else {
    int fd = -1;
    PYPARALLEL_CUDA(cuMemExportToShareableHandle(&fd, memory.get(), cuda::kHandlePosixFd, 0));
    out.fd = UniqueFd(fd);
  }
  return out;
}

MemoryHandle imported(Exported& from, Share share) {
  Handle handle = 0;
  // A descriptor is passed as the pointer itself, a fabric handle by its address.
  void* const os_handle = share == Share::fabric
                              ? static_cast<void*>(&from.fabric)
                              : reinterpret_cast<void*>(static_cast<std::intptr_t>(from.fd.get()));
  PYPARALLEL_CUDA(cuMemImportFromShareableHandle(&handle, os_handle, handle_type(share)));
  return MemoryHandle(handle);
}

std::unique_ptr<DeviceResources> open_handles(const DeviceGroup& g, Share share) {
  auto held = std::make_unique<DeviceResources>();
  const std::size_t bytes = g.layout.block, alignment = g.layout.granularity;
  const int rank = g.group.rank(), size = g.group.size();
  Exported mine;
  together(g.group, g.where + ", allocating", g.deadline, [&] {
    const cuda::AllocationProp prop = cuda::shareable(g.device, handle_type(share));
    Handle handle = 0;
    cuda::check_allocation(cuda::Driver::get().cuMemCreate(&handle, bytes, &prop, 0), "cuMemCreate",
                           bytes);
    held->memory = MemoryHandle(handle);
    held->mapping = cuda::Mapping(held->memory, bytes, alignment, g.device);
    clear(held->mapping.at(), bytes);
    if (size > 1) mine = exported(held->memory, share);
  });
  held->blocks.assign(static_cast<std::size_t>(size), pointer(held->mapping.at()));
  if (size == 1) return held;

  std::vector<Exported> all(static_cast<std::size_t>(size));
  if (share == Share::fabric) {
    const auto handles = gather_all(g.group, mine.fabric, g.deadline);
    for (std::size_t r = 0; r < all.size(); ++r) all[r].fabric = handles[r];
  } else {
    FdExchange exchange(g.group, g.peers, g.where, g.deadline);
    auto fds = exchange.all_to_all(mine.fd.get(), g.deadline);
    for (std::size_t r = 0; r < all.size(); ++r) all[r].fd = std::move(fds[r]);
  }
  together(g.group, g.where + ", mapping the peers' memory", g.deadline, [&] {
    held->peers.resize(all.size());
    for (int r = 0; r < size; ++r) {
      if (r == rank) continue;
      const auto index = static_cast<std::size_t>(r);
      // The mapping keeps the memory; the imported handle is not needed after it.
      held->peers[index] = cuda::Mapping(imported(all[index], share), bytes, alignment, g.device);
      held->blocks[index] = pointer(held->peers[index].at());
    }
  });
  return held;
}

std::unique_ptr<DeviceResources> open_ipc(const DeviceGroup& g) {
  auto held = std::make_unique<DeviceResources>();
  struct Offer {
    IpcHandle handle;
    Address at;
    shm::ProcessIdentity process;
  };
  Offer mine{};
  together(g.group, g.where + ", allocating", g.deadline, [&] {
    Address at = 0;
    cuda::check_allocation(cuda::Driver::get().cuMemAlloc_v2(&at, g.layout.block), "cuMemAlloc",
                           g.layout.block);
    held->allocation = cuda::Allocation(at);
    clear(at, g.layout.block);
    if (g.group.size() > 1) PYPARALLEL_CUDA(cuIpcGetMemHandle(&mine.handle, at));
    mine.at = at;
    mine.process = shm::ProcessIdentity::of_this_process();
  });
  const auto offers = gather_all(g.group, mine, g.deadline);
  together(g.group, g.where + ", opening the peers' memory", g.deadline, [&] {
    held->ipc_peers.resize(offers.size());
    for (std::size_t r = 0; r < offers.size(); ++r) {
      // CUDA IPC does not open a handle in the process that made it; there the address will do.
      if (offers[r].process.pid == mine.process.pid &&
          offers[r].process.pid_namespace == mine.process.pid_namespace) {
        held->blocks.push_back(pointer(offers[r].at));
        continue;
      }
      held->ipc_peers[r] = cuda::IpcMapping(offers[r].handle);
      held->blocks.push_back(pointer(held->ipc_peers[r].at()));
    }
  });
  return held;
}

}  // namespace

std::unique_ptr<DeviceResources> open_shared(const DeviceGroup& g, Share share) {
  return share == Share::cuda_ipc ? open_ipc(g) : open_handles(g, share);
}

void open_multicast(const DeviceGroup& g, Share share, DeviceResources* held) {
  const std::size_t bytes = g.layout.block;
  const int rank = g.group.rank();
  MemoryHandle object;
  Exported shared;
  together(g.group, g.where + ", creating the multicast object", g.deadline, [&] {
    if (rank != 0) return;
    const cuda::MulticastProp prop{static_cast<unsigned>(g.group.size()), bytes,
                                   static_cast<unsigned long long>(handle_type(share)), 0};
    Handle handle = 0;
    PYPARALLEL_CUDA(cuMulticastCreate(&handle, &prop));
    object = MemoryHandle(handle);
    shared = exported(object, share);
  });
  if (share == Share::fabric) {
    g.group.broadcast(&shared.fabric, sizeof shared.fabric, DType::u8, 0, g.deadline);
  } else {
    FdExchange exchange(g.group, g.peers, g.where, g.deadline);
    UniqueFd fd = exchange.broadcast(shared.fd.get(), 0, g.deadline);
    if (rank != 0) shared.fd = std::move(fd);
  }
  together(g.group, g.where + ", adding the device to the multicast object", g.deadline, [&] {
    if (rank != 0) object = imported(shared, share);
    PYPARALLEL_CUDA(cuMulticastAddDevice(object.get(), g.device));
  });
  // Members in this order, so that a failure below undoes what was done, last first.
  DeviceResources made;
  together(g.group, g.where + ", binding memory to the multicast object", g.deadline, [&] {
    made.multicast = std::move(object);
    made.binding = cuda::Binding(made.multicast, held->memory, bytes, g.device);
  });
  together(g.group, g.where + ", mapping the multicast object", g.deadline, [&] {
    made.multicast_mapping = cuda::Mapping(made.multicast, bytes, g.layout.granularity, g.device);
  });
  held->multicast = std::move(made.multicast);
  held->binding = std::move(made.binding);
  held->multicast_mapping = std::move(made.multicast_mapping);
}

}  // namespace pyparallel::symmetric
