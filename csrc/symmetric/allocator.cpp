#include "symmetric/allocator.h"

#include <algorithm>
#include <iterator>

namespace pyparallel::symmetric {

OffsetAllocator::OffsetAllocator(std::size_t bytes) : bytes_(bytes) {}

std::optional<std::size_t> OffsetAllocator::allocate(std::size_t bytes, std::size_t alignment) {
  bytes = std::max<std::size_t>(bytes, 1);
  std::size_t start = 0;
  const auto fits_below = [&](std::size_t end) {
    start = (start + alignment - 1) & ~(alignment - 1);
    return start <= end && bytes <= end - start;
  };
  auto next = taken_.begin();
  for (; next != taken_.end() && !fits_below(next->first); ++next)
    start = next->first + next->second;
  if (next == taken_.end() && !fits_below(bytes_)) return std::nullopt;
  taken_.emplace_hint(next, start, bytes);
  used_ += bytes;
  return start;
}

bool OffsetAllocator::release(std::size_t offset) {
  auto found = taken_.find(offset);
  if (found == taken_.end()) return false;
  used_ -= found->second;
  taken_.erase(found);
  return true;
}

std::size_t OffsetAllocator::size_at(std::size_t offset) const {
  auto found = taken_.find(offset);
  return found == taken_.end() ? 0 : found->second;
}

std::size_t OffsetAllocator::largest_hole() const {
  std::size_t largest = 0, start = 0;
  for (const auto& [offset, length] : taken_) {
    largest = std::max(largest, offset - start);
    start = offset + length;
  }
  return std::max(largest, bytes_ - start);
}

}  // namespace pyparallel::symmetric
