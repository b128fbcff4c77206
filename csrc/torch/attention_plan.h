// From pieces (pyparallel/attention/pieces.py) to tiles, and which of them meet.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "torch/attention_kernels.h"

namespace pyparallel::dist::attention {

// Tiles of at most `most` rows, none with rows of two pieces. `pieces` is int64 [n, 5]: begin,
// length, position, stride, document. Throws InvalidArgument where a piece leaves the `rows` of the
// shard, or a position the range of int32 (`what` names the operand).
std::vector<Tile> cut(const at::Tensor& pieces, std::int64_t rows, std::int64_t most,
                      const char* what);

struct Meetings {
  std::vector<std::int64_t> first, seen;  // see Plan
};
Meetings meetings(const std::vector<Tile>& q_tiles, const std::vector<Tile>& k_tiles,
                  std::int64_t before, std::int64_t after);

}  // namespace pyparallel::dist::attention
