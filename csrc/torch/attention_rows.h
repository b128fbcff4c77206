// The rows of a q tile against a k tile: which columns each sees, and its scores.
#pragma once

#include "torch/attention_packing.h"

namespace pyparallel::dist::attention {
namespace {

// Of float32: the first column of a row.
inline float& at(const Strided& x, std::int64_t batch, std::int64_t row, std::int64_t head) {
  return static_cast<float*>(x.data)[batch * x.batch + row * x.row + head * x.head];
}

// A row of a tile; heads that share keys lie one after the other. It sees columns lo .. hi - 1.
struct QueryRow {
  std::int64_t head;
  std::int64_t row;
  std::int64_t position;
  std::int64_t lo, hi;
};

inline std::int64_t quotient_up(std::int64_t a, std::int64_t b) {  // b > 0
  return a >= 0 ? (a + b - 1) / b : -(-a / b);
}

inline void see(const Rules& rules, const Tile& keys, QueryRow& q) {
  const std::int64_t first = q.position - rules.before - keys.position;
  const std::int64_t past = q.position + rules.after - keys.position + 1;
  q.lo = smaller(larger(quotient_up(first, keys.stride), 0), keys.count);
  q.hi = larger(smaller(quotient_up(past, keys.stride), keys.count), q.lo);
}

// M rows, of which the last may be absent (they see nothing, and their head is -1).
template <int M>
struct Block {
  QueryRow rows[M];
  std::int64_t lo, hi;  // columns that any of them sees

  // Row `first` + m of the tile, for heads `head` .. `head` + `heads` - 1.
  Block(const Rules& rules, const Tile& queries, const Tile& keys, std::int64_t head,
        std::int64_t heads, std::int64_t first) {
    lo = keys.count;
    hi = 0;
    for (int m = 0; m < M; ++m) {
      const std::int64_t at = first + m;
      if (at >= heads * queries.count) {
        rows[m] = {-1, 0, 0, 0, 0};
        continue;
      }
      const std::int64_t i = at % queries.count;
      rows[m] = {head + at / queries.count, queries.begin + i,
                 queries.position + i * queries.stride, 0, 0};
      see(rules, keys, rows[m]);
      if (rows[m].lo == rows[m].hi) continue;
      lo = smaller(lo, rows[m].lo);
      hi = larger(hi, rows[m].hi);
    }
    if (lo >= hi) lo = hi = 0;
  }
};

// Lanes that are columns lo .. hi - 1, for the vector that begins at `column`.
inline Ints lanes_between(std::int64_t column, std::int64_t lo, std::int64_t hi) {
  const Ints lanes = lane_numbers();
  const auto from = static_cast<std::int32_t>(lo - column);
  const auto to = static_cast<std::int32_t>(hi - column);
  return (lanes >= from) & (lanes < to);
}

// How the dot products of one row become scores, and which weights are kept.
struct Scores {
  float scale, softcap, slope;
  float distance;  // q_pos - k_pos at column 0, and how it changes
  float stride;
  std::uint32_t k_position, k_stride, q_position, document, plane;
  std::uint64_t seed, dropped_below;
  float kept_scale;

  Scores(const Rules& rules, const Tile& keys, const QueryRow& q, std::int64_t batch) {
    scale = rules.scale;
    softcap = rules.softcap;
    slope = 0;
    if (rules.slopes != nullptr) {
      slope = rules.slopes[batch * rules.slopes_batch + q.head * rules.slopes_head];
    }
    distance = static_cast<float>(q.position - keys.position);
    stride = static_cast<float>(keys.stride);
    k_position = static_cast<std::uint32_t>(keys.position);
    k_stride = static_cast<std::uint32_t>(keys.stride);
    q_position = static_cast<std::uint32_t>(q.position);
    document = static_cast<std::uint32_t>(keys.document);
    plane = static_cast<std::uint32_t>(batch * rules.all_heads + rules.first_head + q.head);
    seed = rules.seed;
    dropped_below = rules.dropped_below;
    kept_scale = rules.kept_scale;
  }

  // The score; `steepness` becomes its derivative by the scaled product.
  Floats of(Floats product, std::int64_t column, Floats* steepness) const {
    Floats x = product * scale;
    if (softcap != 0) {
      const Floats share = tanh(x * (1.0F / softcap));
      x = share * softcap;
      if (steepness != nullptr) *steepness = 1.0F - share * share;
    }
    if (slope != 0) {
      const Ints lanes = lane_numbers() + static_cast<std::int32_t>(column);
      const Floats apart = distance - __builtin_convertvector(lanes, Floats) * stride;
      x -= slope * (apart < 0 ? -apart : apart);
    }
    return x;
  }

  // 0 where a weight is dropped, and else what it is multiplied by.
  Floats kept(std::int64_t column) const {
    const Words lanes = (Words)lane_numbers() + static_cast<std::uint32_t>(column);
    const Words words = philox(lanes * k_stride + k_position, q_position, document, plane, seed);
    if (dropped_below > 0xFFFFFFFFU) return Floats{};
    return words >= static_cast<std::uint32_t>(dropped_below) ? all(kept_scale) : Floats{};
  }
};

inline bool is_plain(const Rules& rules) {
  return rules.softcap == 0 && rules.slopes == nullptr && rules.scale > 0;
}

}  // namespace
}  // namespace pyparallel::dist::attention
