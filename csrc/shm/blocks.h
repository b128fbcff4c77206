// What the two kinds of collectives (reductions.cpp, moves.cpp) both do with blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "shm/layout.h"

namespace pyparallel::shm {

inline std::byte* bytes_at(void* data, std::size_t offset) {
  return static_cast<std::byte*>(data) + offset;
}
inline const std::byte* bytes_at(const void* data, std::size_t offset) {
  return static_cast<const std::byte*>(data) + offset;
}

// Of the counts of all ranks' blocks (FNV-1a): what CallHeader::digest compares between ranks.
template <typename AnyBlock>
std::uint64_t digest_of(const AnyBlock* blocks, int n) {
  std::uint64_t hash = 14695981039346656037u;
  for (int r = 0; r < n; ++r) hash = (hash ^ blocks[r].count) * 1099511628211u;
  return hash;
}

// How a large call is cut. Alike on all ranks: it depends on what they agree on only.
struct Chunks {
  static constexpr std::size_t slots_at_most = Layout::staging_slots;
  std::size_t part = 0;    // bytes of a block that one chunk has room for
  std::size_t step = 0;    // the same in elements
  std::size_t number = 0;  // chunks until the largest block has gone
  std::size_t slots = 0;   // in use: one per chunk in flight

  // `staging`: a rank's bytes; `parts`: how many of these each slot holds; `largest`: elements.
  static Chunks of(std::size_t staging, std::size_t parts, std::size_t largest,
                   std::size_t element) {
    // A part in flight should stay in the second-level cache of its writer and reader; and four of
    // them are enough for both to be busy.
    constexpr std::size_t most = std::size_t{256} << 10;
    constexpr std::size_t least = std::size_t{16} << 10;
    const std::size_t fits = staging / (slots_at_most * parts) / 64 * 64;
    const std::size_t quarter = (largest * element / 4 + 63) / 64 * 64;
    Chunks cut;
    cut.part = std::min(std::max(quarter, least), std::min(most, fits));
    cut.step = cut.part / element;
    cut.number = (largest + cut.step - 1) / cut.step;
    cut.slots = std::min(slots_at_most, cut.number);
    return cut;
  }
  // Elements of a block of `count` that go with chunk `k`.
  std::size_t length(std::size_t count, std::size_t k) const {
    return count > k * step ? std::min(step, count - k * step) : 0;
  }
};

}  // namespace pyparallel::shm
