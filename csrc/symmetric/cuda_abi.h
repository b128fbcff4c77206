// The part of the CUDA driver's binary interface that this room uses, declared here so that the
// core builds without a CUDA toolkit. tests/symmetric/check_cuda_abi.cpp holds it against cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyparallel::symmetric::cuda {

using Result = int;             // CUresult
using Device = int;             // CUdevice
using Context = void*;          // CUcontext
using Address = std::uint64_t;  // CUdeviceptr
using Handle = std::uint64_t;   // CUmemGenericAllocationHandle

// Results this room tells apart.
constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3,
                 kDeinitialized = 4, kNoDevice = 100, kInvalidDevice = 101,
                 kPeerAccessUnsupported = 217, kNotReady = 600, kNotPermitted = 800,
                 kNotSupported = 801, kSystemNotReady = 802, kSystemDriverMismatch = 803;

// Device attributes.
constexpr int kVirtualMemory = 102, kPosixFdHandles = 103, kFabricHandles = 128, kMulticast = 132;

// Handle types, location, access, granularity, IPC.
constexpr int kHandlePosixFd = 1, kHandleFabric = 8;
constexpr int kLocationDevice = 1, kAllocationPinned = 1, kAccessReadWrite = 3;
constexpr int kGranularityRecommended = 1;
constexpr unsigned kIpcLazyPeerAccess = 1;

struct Location {
  int type;
  int id;
};
struct AllocationProp {
  int type;
  int handle_types;
  Location location;
  void* win32;
  unsigned char compression;
  unsigned char rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
struct AccessDesc {
  Location location;
  int flags;
};
struct MulticastProp {
  unsigned devices;
  std::size_t size;
  unsigned long long handle_types;
  unsigned long long flags;
};
struct FabricHandle {
  unsigned char data[64];
};
struct IpcHandle {
  char data[64];
};
struct Uuid {
  char bytes[16];
};

// clang-format off
// One line per function: name in libcuda.so.1, the feature it belongs to, parameters.
//   base       nothing works without
//   vmm        memory as handles that other processes can map (driver 450, CUDA 11)
//   multicast  one address for all devices (driver 535, CUDA 12.1)
//   ipc        the older way to share device memory
#define PYPARALLEL_CUDA_DRIVER_SYMBOLS(X)                                                              \
  X(cuInit,                          base, (unsigned flags))                                           \
  X(cuDriverGetVersion,              base, (int* version))                                             \
  X(cuGetErrorName,                  base, (Result error, const char** text))                          \
  X(cuGetErrorString,                base, (Result error, const char** text))                          \
  X(cuDeviceGetCount,                base, (int* count))                                               \
  X(cuDeviceGet,                     base, (Device* device, int ordinal))                              \
  X(cuDeviceGetAttribute,            base, (int* value, int attribute, Device device))                 \
  X(cuDeviceGetUuid_v2,              base, (Uuid* uuid, Device device))                                \
  X(cuDeviceCanAccessPeer,           base, (int* can, Device device, Device peer))                     \
  X(cuDevicePrimaryCtxRetain,        base, (Context* context, Device device))                          \
  X(cuDevicePrimaryCtxRelease_v2,    base, (Device device))                                            \
  X(cuCtxPushCurrent_v2,             base, (Context context))                                          \
  X(cuCtxPopCurrent_v2,              base, (Context* context))                                         \
  X(cuCtxSynchronize,                base, ())                                                         \
  X(cuMemGetInfo_v2,                 base, (std::size_t* free, std::size_t* total))                    \
  X(cuMemsetD8_v2,                   base, (Address at, unsigned char value, std::size_t bytes))       \
  X(cuMemGetAllocationGranularity,   vmm,  (std::size_t* bytes, const AllocationProp* prop, int which)) \
  X(cuMemCreate,                     vmm,  (Handle* handle, std::size_t bytes, const AllocationProp* prop, unsigned long long flags)) \
  X(cuMemRelease,                    vmm,  (Handle handle))                                            \
  X(cuMemAddressReserve,             vmm,  (Address* at, std::size_t bytes, std::size_t alignment, Address hint, unsigned long long flags)) \
  X(cuMemAddressFree,                vmm,  (Address at, std::size_t bytes))                            \
  X(cuMemMap,                        vmm,  (Address at, std::size_t bytes, std::size_t offset, Handle handle, unsigned long long flags)) \
  X(cuMemUnmap,                      vmm,  (Address at, std::size_t bytes))                            \
  X(cuMemSetAccess,                  vmm,  (Address at, std::size_t bytes, const AccessDesc* access, std::size_t count)) \
  X(cuMemExportToShareableHandle,    vmm,  (void* out, Handle handle, int type, unsigned long long flags)) \
  X(cuMemImportFromShareableHandle,  vmm,  (Handle* handle, void* from, int type))                     \
  X(cuMulticastCreate,               multicast, (Handle* handle, const MulticastProp* prop))           \
  X(cuMulticastAddDevice,            multicast, (Handle handle, Device device))                        \
  X(cuMulticastBindMem,              multicast, (Handle handle, std::size_t offset, Handle memory, std::size_t memory_offset, std::size_t bytes, unsigned long long flags)) \
  X(cuMulticastUnbind,               multicast, (Handle handle, Device device, std::size_t offset, std::size_t bytes)) \
  X(cuMulticastGetGranularity,       multicast, (std::size_t* bytes, const MulticastProp* prop, int which)) \
  X(cuMemAlloc_v2,                   ipc,  (Address* at, std::size_t bytes))                           \
  X(cuMemFree_v2,                    ipc,  (Address at))                                               \
  X(cuIpcGetMemHandle,               ipc,  (IpcHandle* handle, Address at))                            \
  X(cuIpcOpenMemHandle_v2,           ipc,  (Address* at, IpcHandle handle, unsigned flags))            \
  X(cuIpcCloseMemHandle,             ipc,  (Address at))
// clang-format on

}  // namespace pyparallel::symmetric::cuda
