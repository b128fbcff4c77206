// Cuts offsets out of [0, bytes): first fit, lowest address first. No clock, no address of this
// process: ranks that ask for the same sizes in the same order get the same offsets.
#pragma once

#include <cstddef>
#include <map>
#include <optional>

namespace pyparallel::symmetric {

class OffsetAllocator {
 public:
  explicit OffsetAllocator(std::size_t bytes);

  // An offset with room for `bytes` (at least one, so that every allocation has an offset of its
  // own), a multiple of `alignment` (a power of two); nothing where no hole is large enough.
  std::optional<std::size_t> allocate(std::size_t bytes, std::size_t alignment);
  // False where no allocation starts at `offset`.
  bool release(std::size_t offset);
  // Bytes of the allocation that starts at `offset`, 0 where there is none.
  std::size_t size_at(std::size_t offset) const;

  std::size_t bytes() const { return bytes_; }
  std::size_t used() const { return used_; }
  std::size_t largest_hole() const;

 private:
  std::size_t bytes_;
  std::size_t used_ = 0;
  std::map<std::size_t, std::size_t> taken_;  // offset -> bytes
};

}  // namespace pyparallel::symmetric
