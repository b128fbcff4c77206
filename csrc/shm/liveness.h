// Whether the processes behind the ranks of a group still live.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace pyparallel::shm {

// What a rank writes about its process, for the others to watch.
struct ProcessIdentity {
  std::int32_t pid = 0;
  std::uint64_t start_time = 0;  // of the process, in the kernel's clock ticks: tells a reused pid
  std::uint64_t pid_namespace = 0;  // pids compare only within one

  static ProcessIdentity of_this_process();
};

// Watches one process. Thread-safe.
class ProcessWatch {
 public:
  explicit ProcessWatch(ProcessIdentity identity) : identity_(identity) {}
  // False only when it is certain that the process has ended (a zombie has). Costs a system call.
  bool alive();
  // "alive", "stopped", "dead" or "in another pid namespace": for messages.
  std::string state();
  // 0 where the pid is another namespace's.
  int visible_pid() const;

 private:
  ProcessIdentity identity_;
  std::mutex mutex_;
  UniqueFd pidfd_;  // opened at the first question
  bool opened_ = false;
};

}  // namespace pyparallel::shm
