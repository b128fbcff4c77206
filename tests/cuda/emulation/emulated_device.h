// The host's body of csrc/cuda/device.h: a CUDA thread is a host thread, a block's barrier is a
// std::barrier. Delays are thrown in at random, so that ranks and blocks meet in many orders.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <random>

#define PYPARALLEL_DEVICE inline
#define PYPARALLEL_KERNEL inline void
#define PYPARALLEL_KERNEL_ARGUMENT(type) const type&

namespace pyparallel::cuda {

struct Place {
  unsigned thread, threads, block, blocks;
};

namespace emulation {

// What the threads of one running block share.
class Block {
 public:
  explicit Block(unsigned threads) : gate_(threads, Count{this}) {}
  bool meet(bool mine) {
    if (mine) votes_.store(true, std::memory_order_relaxed);
    gate_.arrive_and_wait();
    return any_;  // stays until all have arrived again
  }

 private:
  struct Count {
    Block* block;
    void operator()() noexcept {
      block->any_ = block->votes_.load(std::memory_order_relaxed);
      block->votes_.store(false, std::memory_order_relaxed);
    }
  };
  std::atomic<bool> votes_{false};
  bool any_ = false;
  std::barrier<Count> gate_;
};

struct Thread {
  Place place{};
  Block* block = nullptr;
  std::minstd_rand random;

  void maybe_delay() {
    if (random() % 32 == 0) usleep(random() % 300);
  }
};
inline thread_local Thread* current = nullptr;

}  // namespace emulation

inline Place here() { return emulation::current->place; }
inline bool meet_any(bool mine) {
  emulation::current->maybe_delay();
  return emulation::current->block->meet(mine);
}
inline void meet() { meet_any(false); }

inline std::uint64_t clock_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}
// More threads than cores: let others run.
inline void pause_polling(unsigned polls) {
  if (polls < 8) {
    sched_yield();
  } else {
    usleep(polls < 100 ? 50 : 500);
  }
}

}  // namespace pyparallel::cuda
