// A workspace: memory of equal layout on every rank of one (group, generation), all zero at first.
// The layout object is the only source of offsets, for kernels, launchers, tests and tools.
//
//   region     written by                    read by              use
//   control    its own rank's kernels        the same             phase, ticket, failed
//   flags      peers (flag [..][source])     its own rank         one per (round, block, source)
//   signals    any rank (add)                its own rank         put_signal / wait_signal
//   consumed   its own rank                  the same             how many of a signal were waited
//   for data       peers (slot of the source)    its own rank         what a source sent; two
//   buffers result     peers (slot of the source)    its own rank         second shot; two buffers
//
// Every flag has a cache line of its own. There are flags for the largest grid, so a launch may use
// any grid up to that; which grid it is belongs to what ranks compare (calls.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device.h"

namespace pyparallel::cuda {

constexpr int kMaxWorld = 72;       // the largest NVLink domain
constexpr int kMaxBlocks = 128;     // largest `max_blocks`
constexpr int kRounds = 2;          // meetings of a two-shot call
constexpr std::size_t kLine = 128;  // bytes between words that different ranks poll

// On one line: only this rank's kernels touch it.
struct Control {
  std::uint32_t phase;   // calls finished; the running call is phase + 1
  std::uint32_t ticket;  // blocks of the running call that are through
  std::uint32_t failed;  // not 0: a wait failed; later launches do nothing
};

struct WorkspaceLayout {
  std::uint32_t world = 1;
  std::uint32_t max_blocks = 32;
  std::uint32_t signals = 32;
  std::uint64_t slot_bytes =
      1 << 20;  // what one source can send in one launch; a multiple of kLine

  PYPARALLEL_HOST_DEVICE std::size_t control() const { return 0; }
  // Block 0 of round 0 comes first, wherever the rest lies: ranks that disagree about the layout
  // still find each other's first flag and see that they do.
  PYPARALLEL_HOST_DEVICE std::size_t flag(std::uint32_t round, std::uint32_t block,
                                          std::uint32_t source) const {
    return kLine + ((std::size_t{round} * max_blocks + block) * world + source) * kLine;
  }
  PYPARALLEL_HOST_DEVICE std::size_t signal(std::uint32_t index) const {
    return flag(kRounds, 0, 0) + std::size_t{index} * kLine;
  }
  PYPARALLEL_HOST_DEVICE std::size_t consumed(std::uint32_t index) const {
    return signal(signals) + std::size_t{index} * kLine;
  }
  // The slots of one buffer lie side by side: [world][slot_bytes].
  PYPARALLEL_HOST_DEVICE std::size_t data(std::uint32_t buffer, std::uint32_t source) const {
    return consumed(signals) + (std::size_t{buffer} * world + source) * slot_bytes;
  }
  PYPARALLEL_HOST_DEVICE std::size_t result(std::uint32_t buffer, std::uint32_t source) const {
    return data(2, 0) + (std::size_t{buffer} * world + source) * slot_bytes;
  }
  PYPARALLEL_HOST_DEVICE std::size_t bytes() const { return result(2, 0); }
};

// Why a call stopped. Written once, by the first thread of this rank whose wait failed; read by the
// host, in device memory or (better: readable while kernels run) in mapped host memory.
struct StatusPage {
  enum State : std::uint32_t { ok = 0, timeout = 1, mismatch = 2, aborted = 3 };
  std::uint32_t state;  // written last
  std::uint32_t abort;  // written by the host: not 0 ends every wait of this rank
  std::uint32_t op;     // Op of calls.h
  std::uint32_t rank, peer, block, round;
  std::uint32_t call;      // number of the call on this workspace, from 1, modulo 2^32
  std::uint64_t expected;  // flag word: call in the high half, signature in the low (calls.h)
  std::uint64_t seen;
  std::uint64_t waited_ns;
};
static_assert(sizeof(StatusPage) <= kLine, "a status page is one line");

}  // namespace pyparallel::cuda
