// Writing what another core has read before and will read again.
//
// A cached store to such a line must first take it from the reader's cache. Between cores that
// share a last-level cache this costs little, and the reader then finds the line near; between
// others it was seen to cost 35 ns a line (2 GB/s, where non-temporal stores, which do not wait,
// made 30 GB/s). Which of the two it is depends on where the system has put the two processes just
// now, so it is measured: each copy begins with cached stores, and goes on with streamed ones where
// those were slow.
#pragma once

#include <chrono>
#include <cstddef>

#include "shm/reduce.h"

namespace pyparallel::shm {

class PeerWriter {
 public:
  void copy(void* out, const void* in, std::size_t bytes) {
    if (bytes < 2 * kProbeBytes) return shm::copy(out, in, bytes, store_);
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    shm::copy(out, in, kProbeBytes, Store::cached);
    const auto took = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start);
    store_ = took.count() > kSlowNanoseconds ? Store::streamed : Store::cached;
    shm::copy(static_cast<std::byte*>(out) + kProbeBytes,
              static_cast<const std::byte*>(in) + kProbeBytes, bytes - kProbeBytes, store_);
  }
  // What the last copy found: for results that are written for peers as they are computed.
  Store store() const { return store_; }

 private:
  static constexpr std::size_t kProbeBytes = 8192;
  static constexpr long kSlowNanoseconds = 2700;  // 3 GB/s
  Store store_ = Store::cached;
};

}  // namespace pyparallel::shm
