// One thread at a time: whose turn it is to make a communicator's next collective. Unlike a mutex,
// a turn is waited for until a deadline, and a signal ends the wait.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>

#include "base/deadline.h"

namespace pyparallel::shm {

class Turns {
 public:
  bool try_begin() { return !taken_.exchange(true, std::memory_order_seq_cst); }
  // Throws Timeout (which says that another thread is in a call of the group `name`), Interrupted.
  void begin(const Deadline& deadline, const std::string& name);
  void end() {
    taken_.store(false, std::memory_order_seq_cst);
    // Ordered after the store, as the waiter's look is after its announcement: it sees one or we
    // the other.
    if (waiting_.load(std::memory_order_seq_cst) != 0) wake();
  }

 private:
  void wake();

  std::atomic<bool> taken_{false};
  std::atomic<int> waiting_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace pyparallel::shm
