#include "shm/turns.h"

#include <algorithm>

#include "base/error.h"
#include "base/interrupt.h"

namespace pyparallel::shm {

void Turns::begin(const Deadline& deadline, const std::string& name) {
  constexpr std::chrono::milliseconds slice(50);
  struct Waiting {
    std::atomic<int>& count;
    explicit Waiting(std::atomic<int>& waiters) : count(waiters) { ++count; }
    ~Waiting() { --count; }
  };
  std::unique_lock lock(mutex_);
  const Waiting waiting(waiting_);
  while (!try_begin()) {
    if (deadline.expired())
      throw Timeout(str("group ", name,
                        ": another thread of this process is still in a call after ",
                        deadline.timeout_seconds(), " s; calls of one group run one at a time"));
    changed_.wait_for(lock, std::min<Deadline::Duration>(deadline.remaining(), slice));
    lock.unlock();
    const bool stop = interrupt_requested();
    lock.lock();
    if (stop) throw Interrupted("wait for another thread's call: interrupted");
  }
}

void Turns::wake() {
  const std::lock_guard lock(mutex_);
  changed_.notify_one();
}

}  // namespace pyparallel::shm
