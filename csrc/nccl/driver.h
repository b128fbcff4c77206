// The few CUDA driver functions that this room needs, found at run time: the calling thread's
// device for calls that are made on another thread, and events to see that launched work is done.
// Without a driver there are neither.
#pragma once

#include <memory>
#include <string>

#include "nccl/abi.h"

namespace pyparallel::nccl {

using Context = void*;  // CUcontext; null: none

// Another driver library than libcuda.so.1: a stand-in. Before the first communicator is made.
void use_driver(const std::string& library);

Context current_context() noexcept;
void use_context(Context context) noexcept;

// A device's primary context, which is the one that CUDA's run time and hence NCCL work in. Null
// without a driver.
Context context_of_device(int device);

// Makes a context current for its lifetime: the caller's current device may be another one.
class InContext {
 public:
  explicit InContext(Context context) : before_(current_context()), changed_(context != before_) {
    if (changed_) use_context(context);
  }
  ~InContext() {
    if (changed_) use_context(before_);
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  const Context before_;
  const bool changed_;
};

// Whether work on streams can be watched in this process.
bool can_record_events() noexcept;

// A point in a stream. Must be destroyed in the context it was made in.
class Event {
 public:
  // Null when the stream is being captured into a graph: what is recorded then has not run.
  static std::unique_ptr<Event> record(Stream stream);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // Again, on a stream of the same context. Gives false as record() gives null.
  bool record_again(Stream stream);
  // Whether the stream has come to it. An error of the device counts as done: whoever synchronises
  // next will see it.
  bool done() const;

 private:
  Event() = default;
  void* event_ = nullptr;
};

}  // namespace pyparallel::nccl
