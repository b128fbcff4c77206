// Waiting for a library that must be asked.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/error.h"
#include "base/interrupt.h"

namespace pyparallel::nccl {

// Between questions to a library that is busy: short at first, then rarely. Notices Ctrl-C.
class Poll {
 public:
  void pause() {
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(2 * pause_, longest);
    if (pause_ == longest && ++slept_ % 25 == 0 && interrupt_requested()) {
      throw Interrupted("interrupted while waiting for NCCL");
    }
  }

 private:
  static constexpr std::chrono::microseconds longest{2000};
  std::chrono::microseconds pause_{20};
  unsigned slept_ = 0;
};

}  // namespace pyparallel::nccl
