// Our declarations of the driver's interface against the toolkit's: compiled, never run.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "symmetric/cuda_abi.h"

namespace ours = pyparallel::symmetric::cuda;

#define SAME_SIZE(a, b) static_assert(sizeof(a) == sizeof(b) && alignof(a) == alignof(b))
#define SAME_PLACE(a, x, b, y) static_assert(offsetof(a, x) == offsetof(b, y))
SAME_SIZE(ours::Result, CUresult);
SAME_SIZE(ours::Device, CUdevice);
SAME_SIZE(ours::Context, CUcontext);
SAME_SIZE(ours::Address, CUdeviceptr);
SAME_SIZE(ours::Handle, CUmemGenericAllocationHandle);
SAME_SIZE(ours::Location, CUmemLocation);
SAME_PLACE(ours::Location, id, CUmemLocation, id);
SAME_SIZE(ours::AllocationProp, CUmemAllocationProp);
SAME_PLACE(ours::AllocationProp, handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_PLACE(ours::AllocationProp, location, CUmemAllocationProp, location);
SAME_PLACE(ours::AllocationProp, win32, CUmemAllocationProp, win32HandleMetaData);
SAME_PLACE(ours::AllocationProp, compression, CUmemAllocationProp, allocFlags);
SAME_SIZE(ours::AccessDesc, CUmemAccessDesc);
SAME_PLACE(ours::AccessDesc, flags, CUmemAccessDesc, flags);
SAME_SIZE(ours::MulticastProp, CUmulticastObjectProp);
SAME_PLACE(ours::MulticastProp, size, CUmulticastObjectProp, size);
SAME_PLACE(ours::MulticastProp, handle_types, CUmulticastObjectProp, handleTypes);
SAME_PLACE(ours::MulticastProp, flags, CUmulticastObjectProp, flags);
SAME_SIZE(ours::FabricHandle, CUmemFabricHandle);
SAME_SIZE(ours::IpcHandle, CUipcMemHandle);
SAME_SIZE(ours::Uuid, CUuuid);

static_assert(ours::kSuccess == CUDA_SUCCESS);
static_assert(ours::kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(ours::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(ours::kNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(ours::kInvalidDevice == CUDA_ERROR_INVALID_DEVICE);
static_assert(ours::kPeerAccessUnsupported == CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
static_assert(ours::kNotPermitted == CUDA_ERROR_NOT_PERMITTED);
static_assert(ours::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(ours::kSystemNotReady == CUDA_ERROR_SYSTEM_NOT_READY);
static_assert(ours::kSystemDriverMismatch == CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
static_assert(ours::kVirtualMemory == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(ours::kPosixFdHandles ==
              CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
static_assert(ours::kFabricHandles == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
static_assert(ours::kMulticast == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
static_assert(ours::kHandlePosixFd == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(ours::kHandleFabric == CU_MEM_HANDLE_TYPE_FABRIC);
static_assert(ours::kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(ours::kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(ours::kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(ours::kGranularityRecommended == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
static_assert(ours::kGranularityRecommended == CU_MULTICAST_GRANULARITY_RECOMMENDED);
static_assert(ours::kIpcLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);

// Parameters: as many, each of the size of the toolkit's.
template <typename F>
struct Signature;
template <typename R, typename... A>
struct Signature<R(A...)> {
  static constexpr std::size_t count = sizeof...(A);
  static constexpr std::size_t sizes[sizeof...(A) + 1] = {sizeof(A)..., sizeof(R)};
};
template <typename A, typename B>
constexpr bool same_call() {
  if (Signature<A>::count != Signature<B>::count) return false;
  for (std::size_t i = 0; i <= Signature<A>::count; ++i)
    if (Signature<A>::sizes[i] != Signature<B>::sizes[i]) return false;
  return true;
}
namespace ours_calls {
using namespace ours;
#define PYPARALLEL_DECLARE(name, feature, parameters) Result name parameters;
PYPARALLEL_CUDA_DRIVER_SYMBOLS(PYPARALLEL_DECLARE)
#undef PYPARALLEL_DECLARE
}  // namespace ours_calls

// The toolkit's header declares the newest version of a call under a macro of its plain name.
#define CHECK_CALL(symbol, plain) \
  static_assert(same_call<decltype(ours_calls::symbol), decltype(::plain)>())
CHECK_CALL(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity);
CHECK_CALL(cuMemCreate, cuMemCreate);
CHECK_CALL(cuMemRelease, cuMemRelease);
CHECK_CALL(cuMemAddressReserve, cuMemAddressReserve);
CHECK_CALL(cuMemAddressFree, cuMemAddressFree);
CHECK_CALL(cuMemMap, cuMemMap);
CHECK_CALL(cuMemUnmap, cuMemUnmap);
CHECK_CALL(cuMemSetAccess, cuMemSetAccess);
CHECK_CALL(cuMemExportToShareableHandle, cuMemExportToShareableHandle);
CHECK_CALL(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle);
CHECK_CALL(cuMulticastCreate, cuMulticastCreate);
CHECK_CALL(cuMulticastAddDevice, cuMulticastAddDevice);
CHECK_CALL(cuMulticastBindMem, cuMulticastBindMem);
CHECK_CALL(cuMulticastUnbind, cuMulticastUnbind);
CHECK_CALL(cuMulticastGetGranularity, cuMulticastGetGranularity);
CHECK_CALL(cuIpcGetMemHandle, cuIpcGetMemHandle);
CHECK_CALL(cuIpcCloseMemHandle, cuIpcCloseMemHandle);
CHECK_CALL(cuDeviceGetAttribute, cuDeviceGetAttribute);
CHECK_CALL(cuDeviceGetUuid_v2, cuDeviceGetUuid);
CHECK_CALL(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer);
CHECK_CALL(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain);
CHECK_CALL(cuCtxSynchronize, cuCtxSynchronize);
