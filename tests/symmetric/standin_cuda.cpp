// A stand-in for libcuda.so.1 on host memory: the part of the driver that csrc/symmetric uses, with
// its rules about order, so that exchange, mapping, binding, errors and clean-up run between
// processes on a machine without a GPU. "Device" addresses are host addresses; handles are memory
// files.
//
// Read from the environment at each call, so that a test may set them in one rank only:
//   STANDIN_CUDA_DEVICES   how many devices there are (8)
//   STANDIN_CUDA_LACKS     attributes that are 0: some of "vmm posix_fd fabric multicast peer"
//   STANDIN_CUDA_FAIL      "cuMemCreate:2 cuMulticastBindMem:802": results of these calls
//   STANDIN_CUDA_DIE       the process is killed in this call
//   STANDIN_CUDA_BUSY      while this file exists, cuCtxSynchronize waits
//   STANDIN_CUDA_MEMORY    bytes of memory of a device (1 GiB)
// Not offered: the effect of a multicast store on all devices; only a multicast object's life is.
#include "standin_cuda_state.h"

extern "C" {

// --- for tests
long standin_live(const char* what) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const std::string kind = what;
  State& s = state();
  if (kind == "handles") return static_cast<long>(s.objects.size());
  if (kind == "reserved") return static_cast<long>(s.reserved.size());
  if (kind == "mapped") return static_cast<long>(s.mapped.size());
  if (kind == "allocations") return static_cast<long>(s.allocations.size());
  if (kind == "opened") return static_cast<long>(s.opened.size());
  if (kind == "contexts") return s.contexts;
  if (kind == "current") return s.current;
  if (kind == "bindings") return s.bindings;
  return -1;
}

// --- base
#ifndef STANDIN_WITHOUT_BASE
Result cuInit(unsigned) { return wanted("cuInit"); }
#endif
Result cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
Result cuGetErrorName(Result error, const char** text) {
  switch (error) {
    case kInvalidValue:
      *text = "CUDA_ERROR_INVALID_VALUE";
      return kSuccess;
    case kOutOfMemory:
      *text = "CUDA_ERROR_OUT_OF_MEMORY";
      return kSuccess;
    case kNoDevice:
      *text = "CUDA_ERROR_NO_DEVICE";
      return kSuccess;
    case kNotPermitted:
      *text = "CUDA_ERROR_NOT_PERMITTED";
      return kSuccess;
    case kNotSupported:
      *text = "CUDA_ERROR_NOT_SUPPORTED";
      return kSuccess;
    case kSystemNotReady:
      *text = "CUDA_ERROR_SYSTEM_NOT_READY";
      return kSuccess;
    default:
      *text = nullptr;
      return kInvalidValue;
  }
}
Result cuGetErrorString(Result error, const char** text) {
  *text = error == kSystemNotReady ? "system not yet initialized" : "text of the stand-in";
  return kSuccess;
}
Result cuDeviceGetCount(int* count) {
  *count = device_count();
  return wanted(__func__);
}
Result cuDeviceGet(Device* device, int ordinal) {
  STANDIN_BEGIN;
  if (ordinal < 0 || ordinal >= device_count()) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}
Result cuDeviceGetAttribute(int* value, int attribute, Device) {
  STANDIN_BEGIN;
  const char* name = attribute == kVirtualMemory    ? "vmm"
                     : attribute == kPosixFdHandles ? "posix_fd"
                     : attribute == kFabricHandles  ? "fabric"
                     : attribute == kMulticast      ? "multicast"
                                                    : nullptr;
  STANDIN_REQUIRE(name != nullptr);
  *value = lacks(name) ? 0 : 1;
  return kSuccess;
}
Result cuDeviceGetUuid_v2(Uuid* uuid, Device device) {
  STANDIN_BEGIN;
  std::memset(uuid->bytes, 0x5a, sizeof uuid->bytes);
  uuid->bytes[0] = static_cast<char>(device);
  return kSuccess;
}
Result cuDeviceCanAccessPeer(int* can, Device, Device) {
  STANDIN_BEGIN;
  *can = lacks("peer") ? 0 : 1;
  return kSuccess;
}
Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  STANDIN_BEGIN;
  ++state().contexts;
  *context = reinterpret_cast<Context>(static_cast<std::intptr_t>(device + 1));
  return kSuccess;
}
Result cuDevicePrimaryCtxRelease_v2(Device) {
  STANDIN_BEGIN;
  --state().contexts;
  return kSuccess;
}
Result cuCtxPushCurrent_v2(Context) {
  STANDIN_BEGIN;
  ++state().current;
  return kSuccess;
}
Result cuCtxPopCurrent_v2(Context*) {
  STANDIN_BEGIN;
  --state().current;
  return kSuccess;
}
Result cuCtxSynchronize() {
  const std::string busy = variable("STANDIN_CUDA_BUSY", "");
  while (!busy.empty() && access(busy.c_str(), F_OK) == 0) usleep(5000);
  return wanted(__func__);
}
Result cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  *total = std::strtoull(variable("STANDIN_CUDA_MEMORY", "1073741824").c_str(), nullptr, 0);
  *free = *total / 2;
  return kSuccess;
}
Result cuMemsetD8_v2(Address at, unsigned char value, std::size_t bytes) {
  STANDIN_BEGIN;
  STANDIN_REQUIRE(state().current > 0);
  std::memset(reinterpret_cast<void*>(at), value, bytes);
  return kSuccess;
}

// --- vmm
#ifndef STANDIN_WITHOUT_VMM
Result cuMemGetAllocationGranularity(std::size_t* bytes, const AllocationProp* prop, int) {
  STANDIN_BEGIN;
  STANDIN_REQUIRE(prop->type == kAllocationPinned && prop->location.type == kLocationDevice);
  *bytes = kGranularity;
  return kSuccess;
}
Result cuMemCreate(Handle* handle, std::size_t bytes, const AllocationProp* prop,
                   unsigned long long flags) {
  STANDIN_BEGIN;
  STANDIN_REQUIRE(flags == 0 && bytes != 0 && bytes % kGranularity == 0);
  STANDIN_REQUIRE(prop->type == kAllocationPinned && prop->location.type == kLocationDevice);
  std::size_t free = 0, total = 0;
  cuMemGetInfo_v2(&free, &total);
  if (bytes > free) return kOutOfMemory;
  const int fd = memfd_create("standin", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  *handle = add_object(fd, prop->handle_types);
  return kSuccess;
}
Result cuMemRelease(Handle handle) {
  STANDIN_BEGIN;
  STANDIN_REQUIRE(state().objects.count(handle) == 1);
  release_object(handle);
  return kSuccess;
}
Result cuMemAddressReserve(Address* at, std::size_t bytes, std::size_t alignment, Address,
                           unsigned long long flags) {
  STANDIN_BEGIN;
  STANDIN_REQUIRE(flags == 0 && bytes % kPage == 0 && (alignment & (alignment - 1)) == 0);
  void* got = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return kOutOfMemory;
  *at = reinterpret_cast<Address>(got);
  state().reserved[*at] = bytes;
  return kSuccess;
}
Result cuMemAddressFree(Address at, std::size_t bytes) {
  STANDIN_BEGIN;
  auto found = state().reserved.find(at);
  STANDIN_REQUIRE(found != state().reserved.end() && found->second == bytes);
  STANDIN_REQUIRE(state().mapped.count(at) == 0);  // unmap first
  munmap(reinterpret_cast<void*>(at), bytes);
  state().reserved.erase(found);
  return kSuccess;
}
Result cuMemMap(Address at, std::size_t bytes, std::size_t offset, Handle handle,
                unsigned long long flags) {
  STANDIN_BEGIN;
  auto object = state().objects.find(handle);
  STANDIN_REQUIRE(flags == 0 && offset == 0 && object != state().objects.end());
  STANDIN_REQUIRE(state().reserved.count(at) == 1 && state().reserved[at] == bytes);
  STANDIN_REQUIRE(bytes <= object->second.bytes);
  const MulticastState* multicast = object->second.multicast;
  // All memory bound before any use.
  STANDIN_REQUIRE(multicast == nullptr || multicast->bound == multicast->devices);
  void* got = mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                   object->second.fd, multicast == nullptr ? 0 : static_cast<off_t>(kPage));
  if (got == MAP_FAILED) return kOutOfMemory;
  ++object->second.users;
  state().mapped[at] = handle;
  return kSuccess;
}
Result cuMemUnmap(Address at, std::size_t bytes) {
  STANDIN_BEGIN;
  auto found = state().mapped.find(at);
  STANDIN_REQUIRE(found != state().mapped.end());
  mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  release_object(found->second);
  state().mapped.erase(found);
  return kSuccess;
}
Result cuMemSetAccess(Address at, std::size_t bytes, const AccessDesc* access, std::size_t count) {
  STANDIN_BEGIN;
  STANDIN_REQUIRE(count == 1 && access->location.type == kLocationDevice);
  STANDIN_REQUIRE(access->flags == kAccessReadWrite && state().mapped.count(at) == 1);
  return mprotect(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess
                                                                                   : kInvalidValue;
}
Result cuMemExportToShareableHandle(void* out, Handle handle, int type, unsigned long long flags) {
  STANDIN_BEGIN;
  auto object = state().objects.find(handle);
  STANDIN_REQUIRE(flags == 0 && object != state().objects.end());
  STANDIN_REQUIRE(object->second.handle_type == type);  // asked for when it was made
  if (type == kHandlePosixFd) {
    const int fd = fcntl(object->second.fd, F_DUPFD_CLOEXEC, 0);
    std::memcpy(out, &fd, sizeof fd);
  } else {
    const Remote remote{getpid(), object->second.fd, object->second.bytes};
    std::memset(out, 0, sizeof(FabricHandle));
    std::memcpy(out, &remote, sizeof remote);
  }
  return kSuccess;
}
Result cuMemImportFromShareableHandle(Handle* handle, void* from, int type) {
  STANDIN_BEGIN;
  int fd = -1;
  Remote remote{};
  if (type == kHandlePosixFd)
    fd = fcntl(static_cast<int>(reinterpret_cast<std::intptr_t>(from)), F_DUPFD_CLOEXEC, 0);
  else
    fd = open_remote(from, &remote);
  STANDIN_REQUIRE(fd >= 0);
  *handle = add_object(fd, type);
  return kSuccess;
}
#endif

// --- multicast
#ifndef STANDIN_WITHOUT_MULTICAST
Result cuMulticastCreate(Handle* handle, const MulticastProp* prop) {
  STANDIN_BEGIN;
  STANDIN_REQUIRE(prop->devices >= 2 && prop->size % kMulticastGranularity == 0 &&
                  prop->flags == 0);
  const int fd = memfd_create("standin-mc", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(prop->size + kPage)) != 0) return kOutOfMemory;
  *handle = add_object(fd, static_cast<int>(prop->handle_types));
  MulticastState* shared = state().objects[*handle].multicast;
  shared->devices = prop->devices;
  shared->size = prop->size;
  return kSuccess;
}
Result cuMulticastAddDevice(Handle handle, Device) {
  STANDIN_BEGIN;
  auto object = state().objects.find(handle);
  STANDIN_REQUIRE(object != state().objects.end() && object->second.multicast != nullptr);
  STANDIN_REQUIRE(object->second.multicast->added < object->second.multicast->devices);
  ++object->second.multicast->added;
  return kSuccess;
}
Result cuMulticastBindMem(Handle handle, std::size_t offset, Handle memory,
                          std::size_t memory_offset, std::size_t bytes, unsigned long long flags) {
  STANDIN_BEGIN;
  auto object = state().objects.find(handle);
  STANDIN_REQUIRE(object != state().objects.end() && object->second.multicast != nullptr);
  STANDIN_REQUIRE(state().objects.count(memory) == 1 && offset == 0 && memory_offset == 0);
  STANDIN_REQUIRE(flags == 0 && bytes <= object->second.multicast->size);
  // All devices added before any memory is bound.
  STANDIN_REQUIRE(object->second.multicast->added == object->second.multicast->devices);
  ++object->second.multicast->bound;
  ++state().bindings;
  return kSuccess;
}
Result cuMulticastUnbind(Handle handle, Device, std::size_t, std::size_t) {
  STANDIN_BEGIN;
  STANDIN_REQUIRE(state().objects.count(handle) == 1);  // unbind before the object goes
  --state().bindings;
  return kSuccess;
}
Result cuMulticastGetGranularity(std::size_t* bytes, const MulticastProp*, int) {
  STANDIN_BEGIN;
  *bytes = kMulticastGranularity;
  return kSuccess;
}
#endif

// --- ipc
Result cuMemAlloc_v2(Address* at, std::size_t bytes) {
  STANDIN_BEGIN;
  STANDIN_REQUIRE(state().current > 0);
  std::size_t free = 0, total = 0;
  cuMemGetInfo_v2(&free, &total);
  if (bytes > free) return kOutOfMemory;
  const int fd = memfd_create("standin-ipc", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  void* got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  *at = reinterpret_cast<Address>(got);
  state().allocations[*at] = bytes;
  state().allocation_fds[*at] = fd;
  return kSuccess;
}
Result cuMemFree_v2(Address at) {
  STANDIN_BEGIN;
  auto found = state().allocations.find(at);
  STANDIN_REQUIRE(found != state().allocations.end());
  munmap(reinterpret_cast<void*>(at), found->second);
  close(state().allocation_fds[at]);
  state().allocation_fds.erase(at);
  state().allocations.erase(found);
  return kSuccess;
}
Result cuIpcGetMemHandle(IpcHandle* handle, Address at) {
  STANDIN_BEGIN;
  STANDIN_REQUIRE(state().allocations.count(at) == 1);  // not for memory of cuMemCreate
  const Remote remote{getpid(), state().allocation_fds[at], state().allocations[at]};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &remote, sizeof remote);
  return kSuccess;
}
Result cuIpcOpenMemHandle_v2(Address* at, IpcHandle handle, unsigned flags) {
  STANDIN_BEGIN;
  Remote remote{};
  const int fd = open_remote(&handle, &remote);
  STANDIN_REQUIRE(flags == kIpcLazyPeerAccess && fd >= 0 && remote.pid != getpid());
  void* got = mmap(nullptr, remote.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  *at = reinterpret_cast<Address>(got);
  state().opened[*at] = remote.bytes;
  return kSuccess;
}
Result cuIpcCloseMemHandle(Address at) {
  STANDIN_BEGIN;
  auto found = state().opened.find(at);
  STANDIN_REQUIRE(found != state().opened.end());
  munmap(reinterpret_cast<void*>(at), found->second);
  state().opened.erase(found);
  return kSuccess;
}

}  // extern "C"

#if !defined(STANDIN_WITHOUT_BASE) && !defined(STANDIN_WITHOUT_VMM) && \
    !defined(STANDIN_WITHOUT_MULTICAST)
// Each symbol of the list must have its body above, or this does not link.
#define PYPARALLEL_ADDRESS(name, feature, parameters) reinterpret_cast<void*>(&name),
void* const standin_all[] = {PYPARALLEL_CUDA_DRIVER_SYMBOLS(PYPARALLEL_ADDRESS)};
#endif
