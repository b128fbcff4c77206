#include "torch/attention_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <sstream>

#include "base/error.h"

namespace pyparallel::dist::attention {
namespace {

bool fits(std::int64_t value) {
  return value >= std::numeric_limits<std::int32_t>::min() &&
         value <= std::numeric_limits<std::int32_t>::max();
}

void check(const Tile& piece, std::int64_t rows, const char* what) {
  const std::int64_t length = piece.count;
  const bool inside =
      piece.begin >= 0 && length >= 1 && length <= rows && piece.begin <= rows - length;
  const bool small = piece.stride >= 1 && fits(piece.stride) && fits(piece.position) &&
                     fits(piece.position + (length - 1) * piece.stride);
  if (inside && small) return;
  std::ostringstream text;
  text << "attention: a piece of " << what << " has begin " << piece.begin << ", length " << length
       << ", position " << piece.position << ", stride " << piece.stride
       << "; expected rows within " << rows << " and positions that go up and stay below 2^31";
  throw InvalidArgument(text.str());
}

bool meet(const Tile& q, const Tile& k, std::int64_t before, std::int64_t after) {
  return k.position <= q.position + (q.count - 1) * q.stride + after &&
         k.position + (k.count - 1) * k.stride >= q.position - before;
}

}  // namespace

std::vector<Tile> cut(const at::Tensor& pieces, std::int64_t rows, std::int64_t most,
                      const char* what) {
  if (pieces.dim() != 2 || pieces.size(1) != 5 || pieces.scalar_type() != at::kLong ||
      !pieces.device().is_cpu()) {
    std::ostringstream text;
    text << "attention: pieces of " << what << " are " << pieces.scalar_type() << " "
         << pieces.sizes() << " on " << pieces.device() << "; expected int64 [n, 5] on cpu";
    throw InvalidArgument(text.str());
  }
  std::vector<Tile> tiles;
  const auto table = pieces.accessor<std::int64_t, 2>();
  for (std::int64_t i = 0; i < table.size(0); ++i) {
    const Tile piece{table[i][0], table[i][1], table[i][2], table[i][3], table[i][4]};
    check(piece, rows, what);
    for (std::int64_t at = 0; at < piece.count; at += most) {
      tiles.push_back({piece.begin + at, std::min(most, piece.count - at),
                       piece.position + at * piece.stride, piece.stride, piece.document});
    }
  }
  return tiles;
}

Meetings meetings(const std::vector<Tile>& q_tiles, const std::vector<Tile>& k_tiles,
                  std::int64_t before, std::int64_t after) {
  std::map<std::int64_t, std::vector<std::int64_t>> of_document;
  for (std::size_t i = 0; i < q_tiles.size(); ++i) {
    of_document[q_tiles[i].document].push_back(static_cast<std::int64_t>(i));
  }
  Meetings found;
  found.first.push_back(0);
  for (const Tile& keys : k_tiles) {
    const auto some = of_document.find(keys.document);
    if (some != of_document.end()) {
      for (const std::int64_t i : some->second) {
        if (meet(q_tiles[static_cast<std::size_t>(i)], keys, before, after)) {
          found.seen.push_back(i);
        }
      }
    }
    found.first.push_back(static_cast<std::int64_t>(found.seen.size()));
  }
  return found;
}

}  // namespace pyparallel::dist::attention
