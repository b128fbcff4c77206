// What the two kinds of collectives (reductions.cpp, moves.cpp) both do with blocks.
#pragma once

#include <cstddef>
#include <cstdint>

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

}  // namespace pyparallel::shm
