// A mutex whose wait has a deadline. (std::timed_mutex waits by a call that ThreadSanitizer of GCC
// 12 does not know, and then reports every unlock.)
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace pyparallel::nccl {

class CallMutex {
 public:
  bool try_lock_for(std::chrono::nanoseconds longest) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!freed_.wait_for(lock, longest, [this] { return !held_; })) return false;
    held_ = true;
    return true;
  }
  void unlock() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      held_ = false;
    }
    freed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable freed_;
  bool held_ = false;
};

}  // namespace pyparallel::nccl
