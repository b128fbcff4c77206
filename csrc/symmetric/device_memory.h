// Owners of the driver's objects, one class per object. Move-only. Destructors ignore errors: at
// exit the driver may be gone before them.
#pragma once

#include <cstddef>
#include <utility>

#include "symmetric/device_choice.h"
#include "symmetric/driver.h"

namespace pyparallel::symmetric::cuda {

// Memory of a device, or a multicast object, as a handle. Mappings of it outlive it.
class MemoryHandle {
 public:
  MemoryHandle() = default;
  explicit MemoryHandle(Handle handle) : handle_(handle), owned_(true) {}
  MemoryHandle(MemoryHandle&& o) noexcept
      : handle_(o.handle_), owned_(std::exchange(o.owned_, false)) {}
  MemoryHandle& operator=(MemoryHandle&& o) noexcept {
    std::swap(handle_, o.handle_);
    std::swap(owned_, o.owned_);
    return *this;
  }
  ~MemoryHandle() {
    if (owned_) Driver::get().cuMemRelease(handle_);
  }
  Handle get() const { return handle_; }
  explicit operator bool() const { return owned_; }

 private:
  Handle handle_ = 0;  // 0 may be a valid handle
  bool owned_ = false;
};

// A handle's memory mapped at an address of this process, readable and writable by `device`.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const MemoryHandle& memory, std::size_t bytes, std::size_t alignment, Device device);
  Mapping(Mapping&& o) noexcept { *this = std::move(o); }
  Mapping& operator=(Mapping&& o) noexcept {
    std::swap(at_, o.at_);
    std::swap(bytes_, o.bytes_);
    std::swap(mapped_, o.mapped_);
    return *this;
  }
  ~Mapping();
  Address at() const { return at_; }

 private:
  Address at_ = 0;
  std::size_t bytes_ = 0;
  bool mapped_ = false;
};

// This device's memory bound to a multicast object. Goes before both.
class Binding {
 public:
  Binding() = default;
  Binding(const MemoryHandle& multicast, const MemoryHandle& memory, std::size_t bytes,
          Device device);
  Binding(Binding&& o) noexcept { *this = std::move(o); }
  Binding& operator=(Binding&& o) noexcept {
    std::swap(multicast_, o.multicast_);
    std::swap(bytes_, o.bytes_);
    std::swap(device_, o.device_);
    return *this;
  }
  ~Binding() {
    if (bytes_ != 0) Driver::get().cuMulticastUnbind(multicast_, device_, 0, bytes_);
  }

 private:
  Handle multicast_ = 0;
  std::size_t bytes_ = 0;  // 0: nothing bound
  Device device_ = 0;
};

// Memory of cuMemAlloc.
class Allocation {
 public:
  Allocation() = default;
  explicit Allocation(Address at) : at_(at) {}
  Allocation(Allocation&& o) noexcept { std::swap(at_, o.at_); }
  Allocation& operator=(Allocation&& o) noexcept {
    std::swap(at_, o.at_);
    return *this;
  }
  ~Allocation() {
    if (at_ != 0) Driver::get().cuMemFree_v2(at_);
  }
  Address at() const { return at_; }

 private:
  Address at_ = 0;
};

// A peer's cuMemAlloc memory, opened through CUDA IPC.
class IpcMapping {
 public:
  IpcMapping() = default;
  explicit IpcMapping(const IpcHandle& handle) {
    PYPARALLEL_CUDA(cuIpcOpenMemHandle_v2(&at_, handle, kIpcLazyPeerAccess));
  }
  IpcMapping(IpcMapping&& o) noexcept { std::swap(at_, o.at_); }
  IpcMapping& operator=(IpcMapping&& o) noexcept {
    std::swap(at_, o.at_);
    return *this;
  }
  ~IpcMapping() {
    if (at_ != 0) Driver::get().cuIpcCloseMemHandle(at_);
  }
  Address at() const { return at_; }

 private:
  Address at_ = 0;
};

// Properties of shareable memory of a device.
AllocationProp shareable(Device device, int handle_type);
// What a device can do. Local.
DeviceFacts facts_of(int ordinal);
// Throws NoMemory (needed and free bytes) where `result` is out of memory, CudaError on other
// errors.
void check_allocation(Result result, const char* call, std::size_t bytes);

}  // namespace pyparallel::symmetric::cuda
