// Which addresses of this process lie in symmetric memory, and where the same bytes are on the
// other ranks. The collectives ask it before they copy: memory that every rank can see needs no
// staging.
//
// How ranks agree on a zero-copy path: each publishes (segment, rank, offset) of its own buffer;
// where all segments are alike, rank r's buffer is at bases[r's published rank] + r's published
// offset in this process. The published rank is the rank in the segment's own group, so the
// communicator may be another one, as long as all its members share the segment.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyparallel::symmetric {

// One rank's region of one symmetric memory. The pointers stay valid as long as its memory is
// mapped.
struct SymmetricRange {
  std::uint64_t segment = 0;          // random, alike on all ranks of the group; never 0
  int rank = 0;                       // whose region it is
  int size = 0;                       // ranks in the group
  int device = -1;                    // CUDA device, -1 for host memory
  std::size_t offset = 0;             // of the address asked for, from the start of the region
  std::size_t bytes = 0;              // from that address to the end of the region
  std::byte* const* bases = nullptr;  // [size] each rank's region, as this process sees it
  std::byte* multicast = nullptr;     // the region's multicast address, nullptr where there is none
};

// True when [data, data + bytes) lies in one registered region. The caller keeps the memory alive
// (it holds a tensor in it). One relaxed load while nothing is registered.
bool find(const void* data, std::size_t bytes, SymmetricRange* range) noexcept;

// Keeps one region registered. `region`: offset 0, `bytes` of the whole region, which starts at
// bases[rank]; must not overlap a registered one. The caller destroys it before it unmaps the
// memory.
class Registration {
 public:
  Registration() = default;
  explicit Registration(const SymmetricRange& region);
  Registration(Registration&& other) noexcept;
  Registration& operator=(Registration&& other) noexcept;
  ~Registration();

 private:
  const std::byte* start_ = nullptr;
};

// Number of registered regions: for leak tests.
std::size_t registered() noexcept;

}  // namespace pyparallel::symmetric
