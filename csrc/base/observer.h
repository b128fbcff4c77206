// Lets a profiler of the caller's world see the communicator's calls.
#pragma once

#include <string>

namespace pyparallel {

// Told of every call that keeps its caller waiting, on the caller's thread. Calls do not overlap on
// a thread.
class CallObserver {
 public:
  // What end() is to be given; nullptr where nobody listens.
  virtual void* begin(const char* op, const std::string& group) = 0;
  virtual void end(void* call) noexcept = 0;

 protected:
  ~CallObserver() = default;
};

// One for the process; it must live as long.
void set_call_observer(CallObserver* observer) noexcept;

// A call, for as long as it lives.
class Observed {
 public:
  Observed(const char* op, const std::string& group);
  ~Observed() {
    if (call_ != nullptr) observer_->end(call_);
  }
  Observed(const Observed&) = delete;
  Observed& operator=(const Observed&) = delete;

 private:
  CallObserver* observer_;
  void* call_ = nullptr;
};

}  // namespace pyparallel
