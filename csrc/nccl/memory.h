// Memory that NCCL can use without copies: allocated by it, or the caller's and registered.
#pragma once

#include <cstddef>
#include <memory>

#include "nccl/communicator.h"

namespace pyparallel::nccl {

// Memory of the current device from ncclMemAlloc. free() may be called twice; the destructor leaves
// the freeing, which may wait for the device, to a background thread.
class Memory {
 public:
  Memory(std::shared_ptr<const Library> library, std::size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  void free();

 private:
  std::shared_ptr<const Library> library_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A range known to one communicator (ncclCommRegister). Ranges of one communicator may not overlap:
// what the library does with sub-ranges is not defined. Ends with close(), the destructor (which
// leaves it to the communicator's next call) or the communicator, whichever comes first.
class Registration {
 public:
  Registration(const std::shared_ptr<Communicator>& communicator, void* data, std::size_t bytes);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  void close();
  bool open() const;

 private:
  std::weak_ptr<Communicator> communicator_;
  std::uintptr_t first_ = 0;
};

// A symmetric window (ncclCommWindowRegister): collective, every rank with the same size. The
// memory must come from Memory (or CUDA's virtual memory calls) and start on 4096 bytes. A library
// that reports success but makes no window cannot: Unsupported.
class Window {
 public:
  Window(const std::shared_ptr<Communicator>& communicator, void* data, std::size_t bytes,
         int flags);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  RawWindow handle() const { return handle_; }
  std::size_t bytes() const { return bytes_; }
  bool belongs_to(const Communicator& communicator) const {
    return communicator_.lock().get() == &communicator;
  }
  void close();
  bool open() const;

 private:
  std::weak_ptr<Communicator> communicator_;
  std::uintptr_t first_ = 0;
  std::size_t bytes_ = 0;
  RawWindow handle_ = nullptr;
};

}  // namespace pyparallel::nccl
