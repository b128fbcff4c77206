// Finds failures that no call reports: a background error of the library, launched work that does
// not end, a thread stuck inside a blocking call. One thread per process looks at every live
// communicator ten times a second; it only asks and records, aborts run elsewhere.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "nccl/driver.h"

namespace pyparallel::nccl {

class Communicator;

// What one communicator has under way.
class Watch {
 public:
  explicit Watch(Context context) : context_(context) {}

  // Work was put on the stream just now. Does nothing for a stream that is being captured.
  void launched(Stream stream, std::string text, Deadline deadline);
  // A thread goes into the library, and comes out.
  void entered(std::string text, Deadline deadline);
  void left() noexcept;
  // Empty, or what has passed its deadline.
  std::string overdue();

 private:
  struct Pending {
    std::unique_ptr<Event> event;
    std::string text;
    Deadline deadline;
  };
  void retire_front();

  const Context context_;
  std::mutex mutex_;
  std::deque<Pending> pending_;
  std::vector<std::unique_ptr<Event>> spare_;
  std::string inside_;
  Deadline inside_deadline_ = Deadline::after(std::chrono::milliseconds(0));
};

class Watchdog {
 public:
  static void add(std::weak_ptr<Communicator> communicator);

 private:
  static void run(Watchdog& dog);
  template <typename T>
  friend T& per_process();
  Watchdog() = default;

  std::mutex mutex_;
  std::vector<std::weak_ptr<Communicator>> communicators_;
  bool running_ = false;
};

}  // namespace pyparallel::nccl
