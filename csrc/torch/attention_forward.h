// Forward: for each k tile, all q tiles of a share that see it continue their softmax.
//
// Within, the maximum of a row is in units of the base-2 logarithm. It is always made anew from the
// natural maximum that the state holds, so that steps that continue each other scale alike.
#pragma once

#include "torch/attention_direct.h"

namespace pyparallel::dist::attention {
namespace {

constexpr std::int64_t kForwardWide = kForwardColumns + 16;
constexpr std::int64_t kWeightsWide = kForwardColumns / kGroup + 16;

struct ForwardBuffers {
  float* keys;     // k^T
  float* values;   // v
  float* queries;  // a block's rows
  float* scores;
  float* weights;  // groups; the scores' place where these are floats
  float* absent;   // an accumulator row for rows that are not there

  static std::int64_t lay_out(const Sizes& sizes, float* at, ForwardBuffers* buffers) {
    const std::int64_t lengths[] = {
        kForwardColumns * up(groups(sizes.width), kPanel),
        up(sizes.value_width, kPanel) * (kForwardColumns / kGroup),
        kMostRows * kWideRow,
        kMostRows * kForwardWide,
        kGroup == 1 ? 0 : kMostRows * kWeightsWide,
        up(sizes.value_width, kPanel),
    };
    float** const places[] = {&buffers->keys,   &buffers->values,  &buffers->queries,
                              &buffers->scores, &buffers->weights, &buffers->absent};
    std::int64_t used = 0;
    for (int i = 0; i < 6; ++i) {
      *places[i] = at + used;
      used += up(lengths[i], 16);
    }
    if (kGroup == 1) buffers->weights = buffers->scores;
    return used;
  }
};

// Weights of a row in place of its scores, over columns begin .. end - 1 of which it sees lo .. hi
// - 1, and its part of the state. Returns what the accumulated row is to be multiplied by.
inline float weigh(const Forward& f, const Tile& keys, const QueryRow& q, std::int64_t batch,
                   std::int64_t begin, std::int64_t end, float* scores, float* weights) {
  const std::int64_t first = down(q.lo, kLanes);
  const std::int64_t past = up(q.hi, kLanes);
  const bool plain = is_plain(f.rules);
  const Scores rule(f.rules, keys, q, batch);
  Floats most = all(-kInfinity);
  for (std::int64_t c = first; c < past; c += kLanes) {
    Floats x = load(scores + c);
    if (!plain) x = rule.of(x, c, nullptr);
    const bool inside = c >= q.lo && c + kLanes <= q.hi;
    if (!inside) x = lanes_between(c, q.lo, q.hi) ? x : all(-kInfinity);
    if (!inside || !plain) store(scores + c, x);
    most = larger(x, most);
  }
  float& row_max = at(f.row_max, batch, q.row, q.head);
  float& row_sum = at(f.row_sum, batch, q.row, q.head);
  const float found = largest(most) * (plain ? f.rules.scale : 1.0F);
  const float old_max = row_max;
  const float new_max = found > old_max ? found : old_max;
  const float base = new_max == -kInfinity ? 0.0F : new_max * kLog2E;
  const float scale = (plain ? f.rules.scale : 1.0F) * kLog2E;
  const float old_scale = old_max == new_max ? 1.0F : exp2(all(old_max * kLog2E - base))[0];
  Floats total = {};
  const auto put = [&](std::int64_t c, Floats x) {
#if defined(PYPARALLEL_ATTENTION_BF16)
    store_rounded(reinterpret_cast<std::uint16_t*>(weights) + c, x);
#else
    store(weights + c, x);
#endif
  };
  for (std::int64_t c = begin; c < first; c += kLanes) put(c, Floats{});
  if (f.rules.dropped_below == 0) {
    for (std::int64_t c = first; c < past; c += kLanes) {
      const Floats x = exp2(load(scores + c) * scale - base);
      total += x;
      put(c, x);
    }
  } else {
    for (std::int64_t c = first; c < past; c += kLanes) {
      const Floats x = exp2(load(scores + c) * scale - base);
      total += x;
      put(c, x * rule.kept(c));
    }
  }
  for (std::int64_t c = past; c < end; c += kLanes) put(c, Floats{});
  row_max = new_max;
  row_sum = row_sum * old_scale + sum(total);
  return old_scale;
}

constexpr std::int64_t kWeights = kGroup == 1 ? kForwardWide : kWeightsWide;

// A k tile in the form of attention_products.h.
struct PackedKeys {
  const Sizes& sizes;
  const ForwardBuffers& buffers;

  template <int M>
  void scores(std::int64_t begin, std::int64_t end) const {
    product<M, kForwardWide, kWideRow, 1>(buffers.queries, buffers.keys, groups(sizes.width), begin,
                                          end, buffers.scores);
  }

  template <int M>
  void add(std::int64_t begin, std::int64_t end, float* const (&rows)[M],
           const float (&factors)[M]) const {
    const std::int64_t from = down(begin, kLanes) / kGroup;
    add_product<M, kWeights, 1>(buffers.weights + from, buffers.values + from * kPanel,
                                kForwardColumns / kGroup, groups(end) - from, sizes.value_width,
                                rows, factors);
  }
};

#if !defined(PYPARALLEL_ATTENTION_BF16)
// A k tile as it lies.
struct DirectKeys {
  const Sizes& sizes;
  const ForwardBuffers& buffers;
  Matrix keys, values;

  template <int M>
  void scores(std::int64_t begin, std::int64_t end) const {
    direct_scores<M, kForwardWide>(buffers.queries, keys, sizes.width, begin, end, buffers.scores);
  }

  template <int M>
  void add(std::int64_t begin, std::int64_t end, float* const (&rows)[M],
           const float (&factors)[M]) const {
    add_direct<M, kForwardWide>(buffers.weights, values, begin, end, sizes.value_width, rows,
                                factors);
  }
};
#endif

template <int M, class Keys>
void forward_block(const Forward& f, const Share& share, const ForwardBuffers& buffers,
                   const Tile& tile, const Block<M>& block, const Keys& keys) {
  alignas(64) Value space[kWideRow];
  float* rows[M];
  float factors[M];
  for (int m = 0; m < M; ++m) {
    const QueryRow& q = block.rows[m];
    rows[m] = buffers.absent;
    factors[m] = 0;
    float* packed = buffers.queries + m * kWideRow;
    const std::int64_t filled = q.head < 0 ? 0 : groups(f.sizes.width);
    for (std::int64_t k = filled; k < up(groups(f.sizes.width), kLanes); ++k) packed[k] = 0;
    if (q.head < 0) continue;
    const Rows source(f.q, f.element, f.sizes.width, share.batch, q.head);
    put_row(source.at(q.row, space), f.sizes.width, packed);
    rows[m] = &at(f.acc, share.batch, q.row, q.head);
  }
  const std::int64_t begin = down(block.lo, kLanes);
  const std::int64_t end = up(block.hi, kLanes);
  keys.template scores<M>(begin, block.hi);
  for (int m = 0; m < M; ++m) {
    const QueryRow& q = block.rows[m];
    float* weights = buffers.weights + m * kWeights;
    if (q.lo == q.hi) {
      if (q.head >= 0) factors[m] = 1;
      for (std::int64_t k = begin / kGroup; k < end / kGroup; ++k) weights[k] = 0;
      continue;
    }
    factors[m] =
        weigh(f, tile, q, share.batch, begin, end, buffers.scores + m * kForwardWide, weights);
  }
  keys.template add<M>(block.lo, block.hi, rows, factors);
}

template <int M, class Keys>
void forward_rows(const Forward& f, const Share& share, const ForwardBuffers& buffers,
                  const Tile& queries, const Tile& tile, std::int64_t head, std::int64_t heads,
                  std::int64_t first, const Keys& keys) {
  const Block<M> block(f.rules, queries, tile, head, heads, first);
  if (block.hi > block.lo) forward_block<M>(f, share, buffers, tile, block, keys);
}

// All heads of the share's group, for one q tile.
template <int kMost, int kSome, class Keys>
void forward_tile(const Forward& f, const Share& share, const ForwardBuffers& buffers,
                  const Tile& queries, const Tile& tile, const Keys& keys) {
  const std::int64_t group = f.sizes.heads / f.sizes.kv_heads;
  const std::int64_t together = smaller(larger(kTileRows / queries.count, 1), group);
  for (std::int64_t h = 0; h < group; h += together) {
    const std::int64_t heads = smaller(together, group - h);
    const std::int64_t head = share.kv_head * group + h;
    const std::int64_t rows = heads * queries.count;
    for (std::int64_t r = 0; r < rows; r += kMost) {
      const std::int64_t left = rows - r;
      if (left > kSome) {
        forward_rows<kMost>(f, share, buffers, queries, tile, head, heads, r, keys);
      } else if (left > 1) {
        forward_rows<kSome>(f, share, buffers, queries, tile, head, heads, r, keys);
      } else {
        forward_rows<1>(f, share, buffers, queries, tile, head, heads, r, keys);
      }
    }
  }
}

std::int64_t forward_scratch(const Sizes& sizes) {
  ForwardBuffers buffers;
  return ForwardBuffers::lay_out(sizes, nullptr, &buffers);
}

void forward(const Forward& f, const Share& share, float* scratch) {
  ForwardBuffers buffers;
  ForwardBuffers::lay_out(f.sizes, scratch, &buffers);
  const Rows key_rows(f.k, f.element, f.sizes.width, share.batch, share.kv_head);
  const Rows value_rows(f.v, f.element, f.sizes.value_width, share.batch, share.kv_head);
  for (std::int64_t t = share.k_part; t < f.plan.k_count; t += share.k_parts) {
    const Tile& tile = f.plan.k_tiles[t];
    const auto each = [&](const auto& visit) {
      for (std::int64_t s = f.plan.first[t]; s < f.plan.first[t + 1]; ++s) {
        if (f.plan.seen[s] % share.q_parts == share.q_part) {
          visit(f.plan.q_tiles[f.plan.seen[s]]);
        }
      }
    };
    std::int64_t rows = 0;
    each([&](const Tile& queries) { rows += queries.count * (f.sizes.heads / f.sizes.kv_heads); });
    if (rows == 0) continue;
#if !defined(PYPARALLEL_ATTENTION_BF16)
    if (rows <= kDirectRows) {
      const DirectKeys keys{f.sizes, buffers,
                            Matrix(key_rows, tile.begin, tile.count, buffers.keys),
                            Matrix(value_rows, tile.begin, tile.count, buffers.values)};
      each([&](const Tile& queries) {
        forward_tile<kDirectRows, kDirectRows / 2>(f, share, buffers, queries, tile, keys);
      });
      continue;
    }
#endif
    pack_across(key_rows, tile.begin, tile.count, buffers.keys);
    pack_along(value_rows, tile.begin, tile.count, kForwardColumns, buffers.values);
    const PackedKeys keys{f.sizes, buffers};
    each([&](const Tile& queries) {
      forward_tile<kMostRows, kMostRows / 2>(f, share, buffers, queries, tile, keys);
    });
  }
}

}  // namespace
}  // namespace pyparallel::dist::attention
