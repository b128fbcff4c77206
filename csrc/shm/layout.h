// What lies where in a group's shared memory: the one place that computes offsets.
//
//   GroupPage                     abort record                                     all write (once)
//   RankPage  [size]              identity, flags, call headers                    its rank writes
//   counts    [size][2][2*size]   per-block counts of uneven calls                 its rank writes
//   inbox     [size][2][inline]   data of small calls, by parity of the sequence   its rank writes
//   staging   [size][staging]     chunks of large calls                            its rank writes
//   rings     [size][size]        send/recv: ring [to][from]                       from writes, to
//   reads
// The first four are reserved when the group is made, the others when a rank first uses its own.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/error.h"
#include "shm/liveness.h"
#include "shm/note.h"
#include "shm/wait.h"

namespace pyparallel::shm {

// What is called: goes over the wire in CallHeader, append only.
enum class Op : std::uint8_t {
  none,
  all_reduce,
  reduce,
  reduce_scatter,
  all_gather,
  all_to_all,
  broadcast,
  scatter,
  gather,
  barrier,
  split,
  refused,  // a rank whose own checks failed; its text says why
  count_
};

constexpr const char* name_of(Op op) {
  constexpr const char* names[] = {"nothing",    "all_reduce", "reduce",    "reduce_scatter",
                                   "all_gather", "all_to_all", "broadcast", "scatter",
                                   "gather",     "barrier",    "split",     "refused"};
  return op < Op::count_ ? names[static_cast<int>(op)] : "an unknown operation";
}

// "group tp (ranks 0-3)": how messages call a group.
inline std::string group_text(const std::string& name, int size) {
  return size == 1 ? str("group ", name, " (rank 0)")
                   : str("group ", name, " (ranks 0-", size - 1, ")");
}

// One call as its rank announces it. One cache line; two per rank, used in turn by the sequence
// number's parity. `arrived` is published last: whoever sees it sees the rest, and the inbox and
// counts of the same parity.
struct alignas(64) CallHeader {
  // all_to_all, scatter, gather: each count of this rank is `count`, its table is unused
  static constexpr std::uint8_t kUniform = 1;
  static constexpr std::uint8_t kInline = 2;  // what this rank sends, if anything, is in its inbox
  static constexpr std::uint8_t kNoted = 4;   // the caller left a note: it is in the rank's page
  static constexpr std::uint8_t kStaged = 8;  // what this rank sends lies whole in its staging

  Flag arrived;  // the call's sequence number
  Op op = Op::none;
  DType dtype = DType::f32;
  ReduceOp reduction = ReduceOp::sum;
  std::uint8_t flags = 0;  // kUniform, kInline, kNoted, kStaged
  std::int16_t root = -1;
  std::int16_t symmetric_rank = 0;  // with symmetric_segment: see symmetric/registry.h
  std::uint64_t count = 0;          // elements; of uneven calls this rank's largest block
  std::uint64_t digest =
      0;  // of the note, and of all blocks' counts where ranks must agree on them
  std::uint64_t symmetric_segment = 0;  // 0: this rank's buffer is private
  std::uint64_t symmetric_offset = 0;
  double factor = 1.0;  // premul_sum

  bool uniform() const { return (flags & kUniform) != 0; }
  bool is_inline() const { return (flags & kInline) != 0; }
  bool noted() const { return (flags & kNoted) != 0; }
  bool staged() const { return (flags & kStaged) != 0; }
};
static_assert(sizeof(CallHeader) == 64, "a header is read in one cache miss");

struct RankPage {
  alignas(64) ProcessIdentity process;
  cpu_set_t cores;                    // that this rank may run on
  alignas(64) std::atomic<int> core;  // where it began its last call
  alignas(64) Flag seat;              // 1 in the group, 2 left it
  alignas(64) Flag ready;             // chunks staged, ever
  alignas(64) Flag done;              // chunks reduced (all_reduce) or consumed (others), ever
  alignas(64) Flag bell;              // send/recv: something changed in one of my rings
  CallHeader calls[2];
  char refusal[2][256] = {};          // text of a refused call
  char note[2][Note::capacity] = {};  // by parity, with kNoted
};

struct GroupPage {
  // 0: none, 1: being written, 2: readable. The first failure wins.
  alignas(64) std::atomic<std::uint32_t> failed{0};
  Status status = Status::ok;
  char text[960] = {};
};

// One direction of one pair. Bytes written and read so far; the data follows.
struct alignas(64) RingPage {
  Flag written;           // by the sender
  alignas(64) Flag read;  // by the receiver
};

class Layout {
 public:
  static constexpr int max_ranks = 1024;
  // Of a rank's staging, each with a part for every rank and one more: at least a line each.
  static constexpr std::size_t staging_slots = 3;

  explicit Layout(int size) : size_(size) {
    const std::size_t n = static_cast<std::size_t>(size);
    inline_bytes_ =
        clamp_power(std::size_t{1} << 20, n, std::size_t{1} << 12, std::size_t{1} << 16);
    staging_bytes_ =
        std::max(clamp_power(std::size_t{64} << 20, n, std::size_t{1} << 16, std::size_t{3} << 20),
                 aligned(staging_slots * (n + 1) * 64));
    ring_bytes_ =
        clamp_power(std::size_t{32} << 20, n * n, std::size_t{1} << 10, std::size_t{1} << 20);
    ranks_ = aligned(sizeof(GroupPage));
    counts_ = ranks_ + aligned(n * sizeof(RankPage));
    inbox_ = counts_ + aligned(n * 2 * 2 * n * sizeof(std::uint64_t));
    staging_ = inbox_ + n * 2 * inline_bytes_;
    rings_ = staging_ + n * staging_bytes_;
    total_ = rings_ + n * n * ring_stride();
  }

  std::size_t bytes() const { return total_; }
  std::size_t reserved_bytes() const { return staging_; }
  std::size_t inline_bytes() const { return inline_bytes_; }
  std::size_t staging_bytes() const { return staging_bytes_; }
  std::size_t ring_bytes() const { return ring_bytes_; }
  std::size_t ring_stride() const { return sizeof(RingPage) + ring_bytes_; }

  std::size_t rank_page(int rank) const { return ranks_ + at(rank) * sizeof(RankPage); }
  std::size_t counts(int rank, unsigned parity) const {
    return counts_ + (at(rank) * 2 + parity) * 2 * at(size_) * sizeof(std::uint64_t);
  }
  std::size_t inbox(int rank, unsigned parity) const {
    return inbox_ + (at(rank) * 2 + parity) * inline_bytes_;
  }
  std::size_t staging(int rank) const { return staging_ + at(rank) * staging_bytes_; }
  std::size_t ring(int from, int to) const {
    return rings_ + (at(to) * at(size_) + at(from)) * ring_stride();
  }

 private:
  static std::size_t at(int index) { return static_cast<std::size_t>(index); }
  static constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 4095) / 4096 * 4096; }
  // total / n, within bounds, down to a multiple of 4096 (or a power of two below that).
  static std::size_t clamp_power(std::size_t total, std::size_t n, std::size_t least,
                                 std::size_t most) {
    const std::size_t share = std::clamp(total / n, least, most);
    return share >= 4096 ? share / 4096 * 4096 : share >= 2048 ? 2048 : 1024;
  }

  int size_;
  std::size_t inline_bytes_, staging_bytes_, ring_bytes_;
  std::size_t ranks_, counts_, inbox_, staging_, rings_, total_;
};

}  // namespace pyparallel::shm
