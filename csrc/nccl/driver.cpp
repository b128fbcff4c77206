#include "nccl/driver.h"

#include <dlfcn.h>

#include <atomic>

#include "base/error.h"

namespace pyparallel::nccl {
namespace {

using Status = int;  // CUresult
constexpr Status success = 0;
constexpr Status not_ready = 600;
constexpr unsigned event_disable_timing = 2;

#define PYPARALLEL_DRIVER_SYMBOLS(X)                                                     \
  X(cuCtxGetCurrent, cuCtxGetCurrent, (Context * context))                               \
  X(cuCtxSetCurrent, cuCtxSetCurrent, (Context context))                                 \
  X(cuDeviceGet, cuDeviceGet, (int* device, int ordinal))                                \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (Context * context, int device)) \
  X(cuEventCreate, cuEventCreate, (void** event, unsigned flags))                        \
  X(cuEventRecord, cuEventRecord, (void* event, Stream stream))                          \
  X(cuEventQuery, cuEventQuery, (void* event))                                           \
  X(cuEventDestroy, cuEventDestroy_v2, (void* event))                                    \
  X(cuStreamIsCapturing, cuStreamIsCapturing, (Stream stream, int* state))

struct Driver {
#define PYPARALLEL_DRIVER_POINTER(name, symbol, parameters) Status(*name) parameters = nullptr;
  PYPARALLEL_DRIVER_SYMBOLS(PYPARALLEL_DRIVER_POINTER)
#undef PYPARALLEL_DRIVER_POINTER

  // Null without a driver. A failure is not kept: the driver may come later.
  static const Driver* get() noexcept {
    const Driver* known = current().load(std::memory_order_acquire);
    return known != nullptr ? known : open("libcuda.so.1");
  }

  static const Driver* open(const char* library) noexcept {
    void* handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return nullptr;
    auto driver = std::make_unique<Driver>();
    bool complete = true;
#define PYPARALLEL_DRIVER_FIND(name, symbol, parameters)                             \
  driver->name = reinterpret_cast<decltype(driver->name)>(::dlsym(handle, #symbol)); \
  complete = complete && driver->name != nullptr;
    PYPARALLEL_DRIVER_SYMBOLS(PYPARALLEL_DRIVER_FIND)
#undef PYPARALLEL_DRIVER_FIND
    if (!complete) return nullptr;
    current().store(driver.get(), std::memory_order_release);
    return driver
        .release();  // for the life of the process: events may be destroyed as late as at exit
  }

 private:
  static std::atomic<const Driver*>& current() {
    static std::atomic<const Driver*> driver{nullptr};
    return driver;
  }
};

void check_driver(Status status, const char* call) {
  if (status != success) throw CudaError(str(call, " failed with CUDA driver error ", status));
}

bool capturing(const Driver& driver, Stream stream) {
  int state = 0;
  check_driver(driver.cuStreamIsCapturing(stream, &state), "cuStreamIsCapturing");
  return state != 0;
}

}  // namespace

void use_driver(const std::string& library) {
  if (Driver::open(library.c_str()) == nullptr) {
    const char* words = ::dlerror();
    throw Unsupported(
        str(library, " is no CUDA driver: ", words != nullptr ? words : "it lacks functions"));
  }
}

Context current_context() noexcept {
  Context context = nullptr;
  const Driver* driver = Driver::get();
  if (driver == nullptr || driver->cuCtxGetCurrent(&context) != success) return nullptr;
  return context;
}

// Null is a context too: none.
void use_context(Context context) noexcept {
  const Driver* driver = Driver::get();
  if (driver != nullptr) driver->cuCtxSetCurrent(context);
}

Context context_of_device(int device) {
  const Driver* driver = Driver::get();
  if (driver == nullptr) return nullptr;
  int handle = 0;
  Context context = nullptr;
  check_driver(driver->cuDeviceGet(&handle, device), "cuDeviceGet");
  // Never released: NCCL keeps the device in use for as long as the process does.
  check_driver(driver->cuDevicePrimaryCtxRetain(&context, handle), "cuDevicePrimaryCtxRetain");
  return context;
}

bool can_record_events() noexcept { return Driver::get() != nullptr; }

std::unique_ptr<Event> Event::record(Stream stream) {
  const Driver* driver = Driver::get();
  if (driver == nullptr || capturing(*driver, stream)) return nullptr;
  std::unique_ptr<Event> event(new Event);
  check_driver(driver->cuEventCreate(&event->event_, event_disable_timing), "cuEventCreate");
  check_driver(driver->cuEventRecord(event->event_, stream), "cuEventRecord");
  return event;
}

bool Event::record_again(Stream stream) {
  const Driver& driver = *Driver::get();
  if (capturing(driver, stream)) return false;
  check_driver(driver.cuEventRecord(event_, stream), "cuEventRecord");
  return true;
}

bool Event::done() const { return Driver::get()->cuEventQuery(event_) != not_ready; }

Event::~Event() {
  if (event_ != nullptr) Driver::get()->cuEventDestroy(event_);
}

}  // namespace pyparallel::nccl
