#include "symmetric/device_memory.h"

#include <algorithm>

#include "base/error.h"

namespace pyparallel::symmetric::cuda {

Mapping::Mapping(const MemoryHandle& memory, std::size_t bytes, std::size_t alignment,
                 Device device) {
  // Built in a local first: its destructor undoes the steps that were done when a later one fails.
  Mapping made;
  PYPARALLEL_CUDA(cuMemAddressReserve(&made.at_, bytes, alignment, 0, 0));
  made.bytes_ = bytes;
  PYPARALLEL_CUDA(cuMemMap(made.at_, bytes, 0, memory.get(), 0));
  made.mapped_ = true;
  const AccessDesc access{{kLocationDevice, device}, kAccessReadWrite};
  PYPARALLEL_CUDA(cuMemSetAccess(made.at_, bytes, &access, 1));
  *this = std::move(made);
}

Mapping::~Mapping() {
  if (mapped_) Driver::get().cuMemUnmap(at_, bytes_);
  if (bytes_ != 0) Driver::get().cuMemAddressFree(at_, bytes_);
}

Binding::Binding(const MemoryHandle& multicast, const MemoryHandle& memory, std::size_t bytes,
                 Device device) {
  PYPARALLEL_CUDA(cuMulticastBindMem(multicast.get(), 0, memory.get(), 0, bytes, 0));
  multicast_ = multicast.get();
  bytes_ = bytes;
  device_ = device;
}

AllocationProp shareable(Device device, int handle_type) {
  AllocationProp prop{};
  prop.type = kAllocationPinned;
  prop.handle_types = handle_type;
  prop.location = {kLocationDevice, device};
  return prop;
}

DeviceFacts facts_of(int ordinal) {
  const Driver& driver = Driver::get();
  DeviceFacts facts;
  facts.ordinal = ordinal;
  Device device = 0;
  PYPARALLEL_CUDA(cuDeviceGet(&device, ordinal));
  PYPARALLEL_CUDA(cuDeviceGetUuid_v2(&facts.uuid, device));
  const bool vmm = driver.vmm_missing.empty() && driver.attribute(kVirtualMemory, device) != 0;
  facts.posix_fd = vmm && driver.attribute(kPosixFdHandles, device) != 0;
  facts.fabric = vmm && driver.attribute(kFabricHandles, device) != 0;
  facts.ipc = driver.ipc_missing.empty();
  facts.multicast =
      vmm && driver.multicast_missing.empty() && driver.attribute(kMulticast, device) != 0;
  const int type = facts.posix_fd != 0 ? kHandlePosixFd : kHandleFabric;
  if (facts.posix_fd != 0 || facts.fabric != 0) {
    const AllocationProp prop = shareable(device, type);
    std::size_t bytes = 0;
    PYPARALLEL_CUDA(cuMemGetAllocationGranularity(&bytes, &prop, kGranularityRecommended));
    facts.granularity = bytes;
  }
  if (facts.multicast != 0) {
    const MulticastProp prop{2, facts.granularity, static_cast<unsigned long long>(type), 0};
    std::size_t bytes = 0;
    // Asked of a device that says it has multicast: an error here means it has not, after all.
    if (driver.cuMulticastGetGranularity(&bytes, &prop, kGranularityRecommended) != kSuccess)
      facts.multicast = 0;
    facts.multicast_granularity = bytes;
  }
  return facts;
}

void check_allocation(Result result, const char* call, std::size_t bytes) {
  if (result != kOutOfMemory) return check(result, call);
  std::size_t free = 0, total = 0;
  Driver::get().cuMemGetInfo_v2(&free, &total);
  throw NoMemory(str(call, ": not enough device memory: ", bytes, " bytes needed, ", free,
                     " bytes free of ", total,
                     ". Use a smaller buffer, or free PyTorch's cached memory first "
                     "(torch.cuda.empty_cache())"));
}

}  // namespace pyparallel::symmetric::cuda
