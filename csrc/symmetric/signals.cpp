#include "symmetric/signals.h"

#include <algorithm>

#include "base/error.h"
#include "symmetric/layout.h"

namespace pyparallel::symmetric {
namespace {

using namespace std::chrono_literals;

// A kernel's put wakes nobody: a sleeper looks again by itself, at growing intervals.
constexpr std::chrono::nanoseconds kFirstSleep = 50us, kLongestSleep = 2ms;
// Between looks at what else may have happened: a signal, an abort, the source's death.
constexpr std::chrono::nanoseconds kLookAround = 50ms;

}  // namespace

Signals::Signals(const Peers& peers, std::vector<std::byte*> pages, int channels, std::string where)
    : peers_(peers),
      pages_(std::move(pages)),
      channels_(channels),
      where_(std::move(where)),
      received_(Layout::signal_lines(peers.size(), channels)),
      spin_(peers.size()) {}

shm::Flag& Signals::line(int owner, std::size_t index) const {
  static_assert(sizeof(shm::Flag) <= kLine);
  return *reinterpret_cast<shm::Flag*>(pages_[static_cast<std::size_t>(owner)] + index * kLine);
}

shm::Flag& Signals::counter(int owner, int channel, int source) const {
  return line(owner, Layout::signal_line(peers_.size(), channel, source));
}

bool Signals::has_left(int rank) const {
  return line(rank, Layout::signal_lines(peers_.size(), channels_) - 1).load() != 0;
}

void Signals::leave() noexcept {
  line(peers_.rank(), Layout::signal_lines(peers_.size(), channels_) - 1).publish(1);
}

void Signals::check(const char* what, const char* role, int rank, int channel) const {
  PYPARALLEL_REQUIRE(rank >= 0 && rank < peers_.size(), what, ", ", where_, ": ", role, " rank ",
                     rank, ", expected 0 to ", peers_.size() - 1);
  PYPARALLEL_REQUIRE(channel >= 0 && channel < channels_, what, ", ", where_, ": channel ", channel,
                     ", expected 0 to ", channels_ - 1);
}

void Signals::put(int peer, int channel) {
  check("put_signal", "peer", peer, channel);
  shm::Flag& flag = counter(peer, channel, peers_.rank());
  // An addition, not a store: threads of this rank may put on one channel at once.
  flag.value.fetch_add(1, std::memory_order_seq_cst);
  if (flag.sleepers.load(std::memory_order_seq_cst) != 0) flag.wake();
}

void Signals::wait(int source, int channel, Deadline deadline) {
  check("wait_signal", "source", source, channel);
  shm::Flag& flag = counter(peers_.rank(), channel, source);
  std::uint64_t& received = received_[Layout::signal_line(peers_.size(), channel, source)];
  const std::uint64_t expected = received + 1;
  if (!spin_.spin([&] { return flag.load() >= expected; }))
    sleep_until(flag, expected, source, channel, deadline);
  received = expected;
}

void Signals::sleep_until(shm::Flag& flag, std::uint64_t expected, int source, int channel,
                          const Deadline& deadline) {
  const std::string what = str("wait_signal, ", where_, ", channel ", channel, ", signal ",
                               expected, " from rank ", source);
  auto pause = kFirstSleep;
  auto next_look = Deadline::Clock::now();
  while (flag.load() < expected) {
    if (Deadline::Clock::now() >= next_look) {
      if (has_left(source) && flag.load() < expected)
        throw PeerLost(str(what, ": that rank has closed this memory"));
      peers_.require_alive(source, what);
      next_look = Deadline::Clock::now() + kLookAround;
    }
    if (deadline.expired())
      throw Timeout(str(what, ": not come after ", deadline.timeout_seconds(), " s; counter ",
                        flag.load(), ", expected ", expected, "; ", peers_.describe(source)));
    shm::Sleeper sleeper(flag);
    const std::uint64_t seen = flag.load();
    if (seen >= expected) break;
    // Ended by a signal: look at once whether that was a request to stop.
    if (!flag.sleep(seen, std::min(pause, deadline.remaining() + 1us))) next_look = {};
    pause = std::min(pause * 2, kLongestSleep);
  }
}

}  // namespace pyparallel::symmetric
