// Flags in shared memory and waiting for them: the only place in csrc/shm where memory order is
// spelled.
//
// Protocol "flag"
//   writer   stores a larger value (release, sequentially consistent), then looks for sleepers and
//            wakes them. The store and the look are ordered against the sleeper's two steps, so
//            that either the sleeper sees the value or the writer sees the sleeper.
//   reader   loads until value >= target (acquire): spins a little, then announces itself as a
//   sleeper,
//            looks once more and sleeps in the kernel on the flag's own word.
// A flag is a counter that only grows; it is never cleared. One cache line each.
// The futex is a shared one (no FUTEX_PRIVATE_FLAG): flags are waited for across processes.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace pyparallel::shm {

struct Flag {
  std::atomic<std::uint64_t> value{0};
  std::atomic<std::uint32_t> sleepers{0};

  std::uint64_t load() const { return value.load(std::memory_order_acquire); }

  // The writer's verb. Only one thread at a time publishes to a flag.
  void publish(std::uint64_t next) {
#ifdef PYPARALLEL_TEST_WEAK_FLAG  // the sanitizer tests' negative control
    value.store(next, std::memory_order_relaxed);
#else
    value.exchange(next, std::memory_order_seq_cst);
#endif
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
  }
  // The writers' verb where there are several: adds one if anybody sleeps. What was written before
  // is seen by whoever finds the new value or was not yet asleep.
  void ring() {
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
    value.fetch_add(1, std::memory_order_seq_cst);
    wake();
  }
  void wake();

  // Sleeps until the value differs from `seen`, a wake-up, a signal or `limit`; may return early.
  // Gives false where a signal ended it. The caller must have announced itself: see Sleeper.
  bool sleep(std::uint64_t seen, std::chrono::nanoseconds limit);
};

// Announces a sleeper for its lifetime. Look at the condition between making it and sleeping.
class Sleeper {
 public:
  explicit Sleeper(Flag& flag) : flag_(flag) {
    flag_.sleepers.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Sleeper() { flag_.sleepers.fetch_sub(1, std::memory_order_seq_cst); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  Flag& flag_;
};

// How long to spin before sleeping. Spinning wins while each rank has a core and its peers are
// awake; it loses milliseconds once a peer needs the core (a spinner uses up the time slice that a
// sleeper would get back at once when woken). So the budget follows success: it grows while spins
// end in the flag and shrinks fast when they do not.
class SpinBudget {
 public:
  // `crowded`: the ranks of the group have fewer cores than there are ranks.
  explicit SpinBudget(bool crowded);

  // Spins while `ready()` is false and the budget lasts. Gives the last answer.
  template <typename Ready>
  bool spin(const Ready& ready) {
    const std::uint32_t budget = budget_.load(std::memory_order_relaxed);
    for (std::uint32_t i = 0; i < budget; ++i) {
      if (ready()) {
        budget_.store(budget + (most_ - budget) / 8, std::memory_order_relaxed);
        return true;
      }
      relax();
    }
    if (ready()) return true;
    budget_.store(std::max(budget - budget / 2, least_), std::memory_order_relaxed);
    return false;
  }

 private:
  static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
  }
  std::uint32_t least_;
  std::uint32_t most_;
  std::atomic<std::uint32_t> budget_;  // threads that wait at once may lose each other's changes
};

// Moves the calling thread to a core that it may use and that is not in `busy`, without narrowing
// what it may use later. For two ranks that have come to share a core while another is idle: the
// scheduler puts a thread that is woken near the one that woke it, and there each can only sleep
// for the other, so that neither ever looks busy enough to be moved.
void move_off(const cpu_set_t& busy);

}  // namespace pyparallel::shm
