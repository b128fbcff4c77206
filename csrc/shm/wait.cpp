#include "shm/wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>

#include "base/env.h"

namespace pyparallel::shm {
namespace {

// The kernel compares 32 bits: the low half of the counter.
std::uint32_t* futex_word(std::atomic<std::uint64_t>& value) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half is taken to come first");
  return reinterpret_cast<std::uint32_t*>(&value);
}

// Steps of SpinBudget in a microsecond, measured once per process.
std::uint32_t spins_per_microsecond() {
  static const std::uint32_t measured = [] {
    using Clock = std::chrono::steady_clock;
    std::atomic<std::uint64_t> never{0};
    double best = 0;
    for (int attempt = 0; attempt < 3; ++attempt) {
      const auto start = Clock::now();
      for (int i = 0; i < 200; ++i) {
        (void)never.load(std::memory_order_acquire);
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
      }
      const double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
      best = std::max(best, 200 / std::max(us, 0.01));
    }
    return static_cast<std::uint32_t>(std::clamp(best, 1.0, 2000.0));
  }();
  return measured;
}

}  // namespace

void Flag::wake() {
  ::syscall(SYS_futex, futex_word(value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool Flag::sleep(std::uint64_t seen, std::chrono::nanoseconds limit) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(limit.count() / 1000000000);
  time.tv_nsec = static_cast<long>(limit.count() % 1000000000);
  const long result = ::syscall(SYS_futex, futex_word(value), FUTEX_WAIT,
                                static_cast<std::uint32_t>(seen), &time, nullptr, 0);
  return !(result == -1 && errno == EINTR);
}

SpinBudget::SpinBudget(bool crowded) {
  const int asked = env::spin_us();
  // With a core each: up to what a sleep and a wake-up cost several times over, and never less than
  // they cost once, since a peer that is merely between two calls comes back sooner.
  const int most = asked >= 0 ? asked : crowded ? 1 : 100;
  const int least = std::min(most, crowded ? 1 : 20);
  most_ = static_cast<std::uint32_t>(most) * spins_per_microsecond();
  least_ = static_cast<std::uint32_t>(least) * spins_per_microsecond();
  budget_ = most_;
}

void move_off(const cpu_set_t& busy) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  cpu_set_t wanted;
  CPU_ZERO(&wanted);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed) && !CPU_ISSET(cpu, &busy)) CPU_SET(cpu, &wanted);
  if (CPU_COUNT(&wanted) == 0) return;
  // The first call moves the thread at once, the second takes the restriction back.
  if (sched_setaffinity(0, sizeof wanted, &wanted) == 0)
    sched_setaffinity(0, sizeof allowed, &allowed);
}

}  // namespace pyparallel::shm
