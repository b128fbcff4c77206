// Counters that one rank raises and another waits for, in host memory that both map.
//
// Protocol "signal": a 64-bit counter per (page owner, channel, source), never cleared; p = number
// of this wait
//   writer    rank `source`, after its stores: add 1, release. A kernel may be the writer
//   reader    the page's owner waits until counter >= p, acquire; then reads
//   reuse     none: the counter only rises, 2^64 puts outlast the memory
//   progress  a put never waits; a wait needs only its put, its deadline or the source's death
// A waiter sleeps on a futex of the counter's low word. Writers that are kernels wake nobody, so no
// sleep is longer than a few milliseconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "shm/wait.h"
#include "symmetric/peers.h"

namespace pyparallel::symmetric {

// One rank's view of all pages. The pages and the peers outlive it.
class Signals {
 public:
  // pages[r]: rank r's page, laid out as in layout.h, zero at first.
  Signals(const Peers& peers, std::vector<std::byte*> pages, int channels, std::string where);

  void put(int peer, int channel);
  // Throws Timeout (the signal may still be waited for), PeerLost, Interrupted, or what broke the
  // group. One thread at a time may wait for a (source, channel).
  void wait(int source, int channel, Deadline deadline);
  // This rank puts nothing any more: who waits for it in vain raises PeerLost.
  void leave() noexcept;

 private:
  shm::Flag& line(int owner, std::size_t index) const;
  shm::Flag& counter(int owner, int channel, int source) const;
  bool has_left(int rank) const;
  void check(const char* what, const char* role, int rank, int channel) const;
  void sleep_until(shm::Flag& flag, std::uint64_t expected, int source, int channel,
                   const Deadline& deadline);

  const Peers& peers_;
  const std::vector<std::byte*> pages_;
  const int channels_;
  const std::string where_;              // "symmetric memory of group tp (generation 3)"
  std::vector<std::uint64_t> received_;  // [channel x size + source] waits that have returned
  shm::SpinBudget spin_;
};

}  // namespace pyparallel::symmetric
