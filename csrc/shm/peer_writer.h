// Writing what another core has read before and will read next: staging, inboxes, rings.
//
// A cached store must first take the line from the reader's cache. Between cores that share a
// last-level cache this costs little, and the reader then finds the line near. Between others it
// was seen to cost 35 ns a line (1 MB: 600 us), where streamed stores, which do not wait, cost
// alike everywhere (1 MB: 70 to 90 us, at worst half more than cached ones between near cores).
// Which of the two it is changes whenever the system moves a process, so it is measured all the
// time: a copy begins with a page of cached stores under the clock, and goes on as that suggests.
// Once they were slow only one copy in kProbeEvery begins so: the page costs 2 us then, a tenth of
// a call that moves 256 KB in eight copies.
#pragma once

#include <chrono>
#include <cstddef>

#include "shm/reduce.h"

namespace pyparallel::shm {

class PeerWriter {
 public:
  void copy(void* out, const void* in, std::size_t bytes) {
    std::size_t probed = 0;
    if (bytes >= kProbeBytes && (store_ == Store::cached || ++since_probe_ == kProbeEvery)) {
      probe(out, in);
      probed = kProbeBytes;
    }
    shm::copy(static_cast<std::byte*>(out) + probed, static_cast<const std::byte*>(in) + probed,
              bytes - probed, store_);
  }
  // What the last copies suggest: for results that are written for peers as they are computed.
  Store store() const { return store_; }

 private:
  static constexpr std::size_t kProbeBytes = 4096;
  static constexpr std::chrono::nanoseconds kSlow{1100};  // 17 ns a line
  static constexpr int kProbeEvery = 16;

  void probe(void* out, const void* in) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    shm::copy(out, in, kProbeBytes, Store::cached);
    // The stores are done when they have left the store buffer, which holds about as many.
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    store_ = Clock::now() - start > kSlow ? Store::streamed : Store::cached;
    since_probe_ = 0;
  }

  Store store_ = Store::cached;
  int since_probe_ = 0;
};

}  // namespace pyparallel::shm
