// Where things lie in symmetric memory: integers only, the same on every rank.
//
// Each rank owns one block [data | signal page], and all blocks are alike, so an offset means the
// same thing everywhere. Host memory puts the blocks one after another in one memory file; on CUDA
// devices each block is an allocation of its own.
//   data         what tensors are cut from: at least the bytes asked for
//   signal page  channels x size lines of 64 bytes; the first 8 bytes of line (channel, source) are
//   a
//                counter that only rank `source` raises and only the page's owner waits for. One
//                more line, the seat, is written by the owner alone: 1 once it has left
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "base/error.h"

namespace pyparallel::symmetric {

constexpr std::size_t kLine = 64;    // a cache line
constexpr std::size_t kUnit = 4096;  // signal pages begin and end at multiples

struct Layout {
  int size = 0;
  int channels = 0;
  std::size_t granularity = 0;   // of blocks, and the largest alignment an offset can have
  std::size_t bytes = 0;         // data of one rank
  std::size_t signal_bytes = 0;  // signal page of one rank
  std::size_t block = 0;         // stride between blocks

  // Throws InvalidArgument where the sizes are out of range or do not fit the address space.
  static Layout make(int size, std::size_t bytes, int channels, std::size_t granularity) {
    PYPARALLEL_REQUIRE(size >= 1 && size <= max_size, "symmetric memory: a group of ", size,
                       " ranks; 1 to ", max_size, " are possible");
    PYPARALLEL_REQUIRE(channels >= 1 && channels <= max_channels, "symmetric memory: ", channels,
                       " signal channels; 1 to ", max_channels, " are possible");
    PYPARALLEL_REQUIRE(granularity >= kUnit && (granularity & (granularity - 1)) == 0,
                       "symmetric memory: granularity ", granularity, " is no power of two from ",
                       kUnit);
    PYPARALLEL_REQUIRE(bytes >= 1, "symmetric memory: 0 bytes asked for; at least 1 is needed");
    Layout layout;
    layout.size = size;
    layout.channels = channels;
    layout.granularity = granularity;
    layout.signal_bytes = round_up(signal_lines(size, channels) * kLine, kUnit);
    // Half the address space, so that no sum of two checked sizes can wrap.
    const std::size_t limit = std::numeric_limits<std::size_t>::max() / 2;
    PYPARALLEL_REQUIRE(
        bytes <= (limit - granularity - layout.signal_bytes) / static_cast<std::size_t>(size) -
                     (granularity + layout.signal_bytes),
        "symmetric memory: ", bytes, " bytes on each of ", size, " ranks exceed the address space");
    layout.block = round_up(round_up(bytes, kUnit) + layout.signal_bytes, granularity);
    layout.bytes = layout.block - layout.signal_bytes;  // what rounding gives is data
    return layout;
  }

  std::size_t block_of(int rank) const { return block * static_cast<std::size_t>(rank); }
  // From the start of a block.
  std::size_t signal_page() const { return bytes; }
  std::size_t signal(int channel, int source) const {
    return bytes + signal_line(size, channel, source) * kLine;
  }
  std::size_t total() const { return block * static_cast<std::size_t>(size); }

  // Lines of a signal page, and which of them is a counter or (last) the seat.
  static constexpr std::size_t signal_lines(int size, int channels) {
    return signal_line(size, channels, 0) + 1;
  }
  static constexpr std::size_t signal_line(int size, int channel, int source) {
    return static_cast<std::size_t>(channel) * static_cast<std::size_t>(size) +
           static_cast<std::size_t>(source);
  }

  static constexpr int max_size = 1 << 16;
  static constexpr int max_channels = 1 << 16;
  static constexpr std::size_t round_up(std::size_t n, std::size_t unit) {
    return (n + unit - 1) & ~(unit - 1);
  }
};

}  // namespace pyparallel::symmetric
