// A point in time after which a wait gives up. Time, not spins.
#pragma once

#include <algorithm>
#include <chrono>

namespace pyparallel {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  using Duration = std::chrono::nanoseconds;

  // Timeouts beyond about a century are taken as that: no overflow in the sum.
  static Deadline after(std::chrono::milliseconds timeout) {
    constexpr std::chrono::hours longest(24 * 365 * 100);
    return Deadline(std::min<Duration>(timeout, longest));
  }

  bool expired() const { return Clock::now() >= end_; }
  // Never negative.
  Duration remaining() const { return std::max(Duration(0), Duration(end_ - Clock::now())); }
  // How long the whole wait was to be: for messages.
  double timeout_seconds() const { return std::chrono::duration<double>(timeout_).count(); }

 private:
  explicit Deadline(Duration timeout) : timeout_(timeout), end_(Clock::now() + timeout) {}
  Duration timeout_;
  Clock::time_point end_;
};

}  // namespace pyparallel
