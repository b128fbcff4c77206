#include "symmetric/driver.h"

#include <dlfcn.h>

#include "base/error.h"

namespace pyparallel::symmetric::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

// What usually is behind a result that says little by itself.
const char* likely_cause(Result result) {
  switch (result) {
    case kSystemNotReady:
      return "Likely cause: the fabric manager is not running or not ready (systemctl status "
             "nvidia-fabricmanager; nvidia-smi -q shows Fabric State)";
    case kSystemDriverMismatch:
      return "Likely cause: user-space driver and kernel module have different versions (restart "
             "after the driver's update)";
    case kNotPermitted:
      return "Likely cause: the device is in a container or MIG slice that may not share memory, "
             "or "
             "fabric handles without an IMEX channel (/dev/nvidia-caps-imex-channels)";
    case kNotSupported:
      return "Likely cause: the driver, or this device (MIG slice, virtual GPU), does not offer it";
    case kInvalidValue:
      return "Likely cause, when sharing: the memory does not come from the call that can share it "
             "(PyTorch's PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes memory that CUDA "
             "IPC "
             "cannot share)";
    case kPeerAccessUnsupported:
      return "Likely cause: the devices have no NVLink or PCIe peer-to-peer path (nvidia-smi topo "
             "-p2p "
             "r)";
    default:
      return nullptr;
  }
}

}  // namespace

Driver::Driver() {
  // Never closed: memory may be unmapped as late as at exit.
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw Unsupported(str("CUDA driver: ", ::dlerror(),
                          ". CUDA symmetric memory needs an NVIDIA driver (in a container: started "
                          "with its GPUs)"));
  std::string base_missing;
  const auto missing = [](std::string& list, const char* name) {
    list += str(list.empty() ? "" : ", ", name);
  };
#define PYPARALLEL_LOAD(name, feature, parameters)                        \
  name = reinterpret_cast<Result(*) parameters>(::dlsym(library, #name)); \
  if (name == nullptr) missing(feature##_missing, #name);
  PYPARALLEL_CUDA_DRIVER_SYMBOLS(PYPARALLEL_LOAD)
#undef PYPARALLEL_LOAD
  if (!base_missing.empty())
    throw Unsupported(
        str("CUDA driver: ", kLibrary, " lacks ", base_missing, "; a newer driver is needed"));
  if (const Result result = cuInit(0); result != kSuccess)
    throw Unsupported(error_text("cuInit(0)", result));
  if (const Result result = cuDriverGetVersion(&version); result != kSuccess)
    throw Unsupported(error_text("cuDriverGetVersion", result));
  if (const Result result = cuDeviceGetCount(&device_count); result != kSuccess)
    throw Unsupported(error_text("cuDeviceGetCount", result));
}

const Driver& Driver::get() {
  // Never destroyed, for the same reason. A failure is tried again: the driver may come later.
  static const Driver* const driver = new Driver;
  return *driver;
}

std::string Driver::unavailable() {
  try {
    get();
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

std::string Driver::error_text(const std::string& call, Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != kSuccess || name == nullptr) name = "unknown error";
  if (cuGetErrorString(result, &text) != kSuccess || text == nullptr) text = "";
  const char* cause = likely_cause(result);
  return str(call, ": ", name, " (", result, "): ", text, cause == nullptr ? "" : ". ",
             cause == nullptr ? "" : cause);
}

int Driver::attribute(int which, Device device) const {
  int value = 0;
  // An attribute this driver does not know is one it does not have.
  return cuDeviceGetAttribute(&value, which, device) == kSuccess ? value : 0;
}

void check(Result result, const char* call) {
  if (result != kSuccess) throw CudaError(Driver::get().error_text(call, result));
}

CurrentDevice::CurrentDevice(int ordinal) {
  PYPARALLEL_CUDA(cuDeviceGet(&device_, ordinal));
  Context context = nullptr;
  PYPARALLEL_CUDA(cuDevicePrimaryCtxRetain(&context, device_));
  const Result pushed = Driver::get().cuCtxPushCurrent_v2(context);
  if (pushed != kSuccess) {
    Driver::get().cuDevicePrimaryCtxRelease_v2(device_);
    check(pushed, "cuCtxPushCurrent");
  }
}

CurrentDevice::~CurrentDevice() {
  Context context = nullptr;
  Driver::get().cuCtxPopCurrent_v2(&context);
  Driver::get().cuDevicePrimaryCtxRelease_v2(device_);
}

}  // namespace pyparallel::symmetric::cuda
