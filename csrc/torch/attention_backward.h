// Backward: for each k tile, packed once, all q tiles of a share that see it add their gradients.
//
//   p = exp(s - lse)   dp = undrop(dout v^T)   ds = scale p (dp - delta) s'
//   dq += ds k         dv += drop(p)^T dout    dk += ds^T q
// dk and dv of the tile are summed over all these rows, and so over the heads that share the keys,
// before they are added to the tensors: in the order of the plan, whatever the number of threads.
#pragma once

#include "torch/attention_rows.h"

namespace pyparallel::dist::attention {
namespace {

constexpr std::int64_t kBackwardWide = kBackwardColumns + 16;
// Weights by rows, for dq: groups run along the columns. And by columns, for dk and dv: groups run
// along the rows. The same thing where a group is one float.
constexpr std::int64_t kByRows = kGroup == 1 ? kBackwardWide : kBackwardColumns / kGroup + 16;
constexpr std::int64_t kTileGroups = kTileRows / kGroup;

struct BackwardBuffers {
  float* keys_across;    // k^T
  float* values_across;  // v^T
  float* keys;           // k
  float* queries;        // a tile's q
  float* douts;          // and dout
  float* query_rows;     // a block's q
  float* dout_rows;      // and dout
  float* scores;         // of a block
  float* dweights;
  float* p;  // of a tile, by columns
  float* ds;
  float* ds_rows;  // of a block, by rows; the place in `ds` where a group is one float
  float* dk;       // of the k tile
  float* dv;
  float* absent;

  static std::int64_t lay_out(const Sizes& sizes, float* at, BackwardBuffers* buffers) {
    const std::int64_t wide = up(sizes.width, kPanel);
    const std::int64_t value_wide = up(sizes.value_width, kPanel);
    const std::int64_t lengths[] = {
        kBackwardColumns * groups(sizes.width),
        kBackwardColumns * groups(sizes.value_width),
        wide * (kBackwardColumns / kGroup),
        wide * kTileGroups,
        value_wide * kTileGroups,
        kMostRows * kWideRow,
        kMostRows * kWideRow,
        kMostRows * kBackwardWide,
        kMostRows * kBackwardWide,
        (kTileRows + kMostRows) / kGroup * kBackwardWide,
        (kTileRows + kMostRows) / kGroup * kBackwardWide,
        kGroup == 1 ? 0 : kMostRows * kByRows,
        (kBackwardColumns + kMostRows) * wide,
        (kBackwardColumns + kMostRows) * value_wide,
        larger(wide, value_wide),
    };
    float** const places[] = {&buffers->keys_across, &buffers->values_across,
                              &buffers->keys,        &buffers->queries,
                              &buffers->douts,       &buffers->query_rows,
                              &buffers->dout_rows,   &buffers->scores,
                              &buffers->dweights,    &buffers->p,
                              &buffers->ds,          &buffers->ds_rows,
                              &buffers->dk,          &buffers->dv,
                              &buffers->absent};
    std::int64_t used = 0;
    for (int i = 0; i < 15; ++i) {
      *places[i] = at + used;
      used += up(lengths[i], 16);
    }
    return used;
  }
};

// What the gradients of one k tile need to know.
struct KeyTile {
  const Backward& f;
  const Share& share;
  const BackwardBuffers& buffers;
  const Tile& keys;
};

// p and ds of row `number` of the tile, over columns begin .. end - 1.
inline void differentiate(const KeyTile& tile, const QueryRow& q, int m, std::int64_t number,
                          std::int64_t begin, std::int64_t end) {
  const Backward& f = tile.f;
  const BackwardBuffers& buffers = tile.buffers;
  const float* scores = buffers.scores + m * kBackwardWide;
  const float* dweights = buffers.dweights + m * kBackwardWide;
  const auto put = [&](std::int64_t c, Floats p, Floats ds) {
#if defined(PYPARALLEL_ATTENTION_BF16)
    store_rounded(reinterpret_cast<std::uint16_t*>(buffers.ds_rows + m * kByRows) + c, ds);
    const std::int64_t place = number / 2 * kBackwardWide + c;
    const auto pair = [&](float* to, Floats x) {
      const __m512i words = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)(x)));
      __m512i* place = reinterpret_cast<__m512i*>(to);
      if (number % 2 == 0) return _mm512_storeu_si512(place, words);
      _mm512_storeu_si512(place,
                          _mm512_or_si512(_mm512_loadu_si512(place), _mm512_slli_epi32(words, 16)));
    };
    pair(buffers.p + place, p);
    pair(buffers.ds + place, ds);
#else
    store(buffers.p + number * kBackwardWide + c, p);
    store(buffers.ds + number * kBackwardWide + c, ds);
#endif
  };
  const std::int64_t first = q.lo == q.hi ? end : down(q.lo, kLanes);
  const std::int64_t past = q.lo == q.hi ? end : up(q.hi, kLanes);
  for (std::int64_t c = begin; c < first; c += kLanes) put(c, Floats{}, Floats{});
  if (first < past) {
    const bool plain = is_plain(f.rules);
    const Scores rule(f.rules, tile.keys, q, tile.share.batch);
    const float lse = at(f.lse, tile.share.batch, q.row, q.head);
    const float base = lse == -kInfinity ? 0.0F : lse * kLog2E;
    const float delta = at(f.delta, tile.share.batch, q.row, q.head);
    const float scale = (plain ? f.rules.scale : 1.0F) * kLog2E;
    for (std::int64_t c = first; c < past; c += kLanes) {
      Floats x = load(scores + c);
      Floats steepness = all(f.rules.scale);
      if (!plain) {
        Floats slope = all(1.0F);
        x = rule.of(x, c, &slope);
        steepness *= slope;
      }
      Floats p = exp2(x * scale - base);
      Floats dp = load(dweights + c);
      const bool inside = c >= q.lo && c + kLanes <= q.hi;
      if (!inside) {
        const Ints seen = lanes_between(c, q.lo, q.hi);
        p = seen ? p : Floats{};
        dp = seen ? dp : Floats{};
      }
      Floats kept = p;
      if (f.rules.dropped_below != 0) {
        const Floats factor = rule.kept(c);
        kept = p * factor;
        dp *= factor;
      }
      put(c, kept, p * (dp - delta) * steepness);
    }
  }
  for (std::int64_t c = past; c < end; c += kLanes) put(c, Floats{}, Floats{});
}

// p, ds and dq of M rows from row `first` of the tile on, over its columns begin .. end - 1.
template <int M>
void block_gradients(const KeyTile& tile, const Block<M>& block, std::int64_t first,
                     std::int64_t begin, std::int64_t end) {
  const Backward& f = tile.f;
  const BackwardBuffers& buffers = tile.buffers;
  const std::int64_t width = f.sizes.width;
  const std::int64_t value_width = f.sizes.value_width;
  if (block.hi > block.lo) {
    alignas(64) Value space[kWideRow];
    for (int m = 0; m < M; ++m) {
      const QueryRow& q = block.rows[m];
      float* query = buffers.query_rows + m * kWideRow;
      float* dout = buffers.dout_rows + m * kWideRow;
      if (q.head < 0) {
        for (std::int64_t k = 0; k < groups(width); ++k) query[k] = 0;
        for (std::int64_t k = 0; k < groups(value_width); ++k) dout[k] = 0;
        continue;
      }
      const Rows queries(f.q, f.element, width, tile.share.batch, q.head);
      put_row(queries.at(q.row, space), width, query);
      const Rows douts(f.dout, f.element, value_width, tile.share.batch, q.head);
      put_row(douts.at(q.row, space), value_width, dout);
    }
    const std::int64_t from = down(block.lo, kLanes);
    product<M, kBackwardWide, kWideRow, 1>(buffers.query_rows, buffers.keys_across, groups(width),
                                           from, block.hi, buffers.scores);
    product<M, kBackwardWide, kWideRow, 1>(buffers.dout_rows, buffers.values_across,
                                           groups(value_width), from, block.hi, buffers.dweights);
  }
  for (int m = 0; m < M; ++m) differentiate(tile, block.rows[m], m, first + m, begin, end);
  if (block.hi == block.lo) return;
  float* rows[M];
  float factors[M];
  for (int m = 0; m < M; ++m) {
    const QueryRow& q = block.rows[m];
    rows[m] = q.head < 0 ? buffers.absent : &at(f.dq, tile.share.batch, q.row, q.head);
    factors[m] = 1;
  }
  const float* ds = kGroup == 1 ? buffers.ds + first * kByRows : buffers.ds_rows;
  const std::int64_t from = down(block.lo, kLanes) / kGroup;
  add_product<M, kByRows, 1>(ds + from, buffers.keys + from * kPanel, kBackwardColumns / kGroup,
                             groups(block.hi) - from, width, rows, factors);
}

// dk and dv of M keys from column `column` on get their part of `depth` groups of rows.
template <int M>
void key_gradients(const KeyTile& tile, std::int64_t column, std::int64_t first,
                   std::int64_t depth) {
  const BackwardBuffers& buffers = tile.buffers;
  const std::int64_t wide = up(tile.f.sizes.width, kPanel);
  const std::int64_t value_wide = up(tile.f.sizes.value_width, kPanel);
  float* dk[M];
  float* dv[M];
  float factors[M];
  for (int m = 0; m < M; ++m) {
    dk[m] = buffers.dk + (column + m) * wide;
    dv[m] = buffers.dv + (column + m) * value_wide;
    factors[m] = 1;
  }
  const std::int64_t place = first * kBackwardWide + column;
  add_product<M, 1, kBackwardWide>(buffers.p + place, buffers.douts + first * kPanel, kTileGroups,
                                   depth, value_wide, dv, factors);
  add_product<M, 1, kBackwardWide>(buffers.ds + place, buffers.queries + first * kPanel,
                                   kTileGroups, depth, wide, dk, factors);
}

// Queries of heads head .. head + heads - 1 against the k tile.
inline void tile_gradients(const KeyTile& tile, const Tile& queries, std::int64_t head,
                           std::int64_t heads) {
  constexpr int M = kMostRows;
  const Backward& f = tile.f;
  const BackwardBuffers& buffers = tile.buffers;
  const std::int64_t rows = heads * queries.count;
  const std::int64_t padded = up(rows, M);
  alignas(64) Value space[kWideRow];
  for (std::int64_t r = 0; r < up(rows, kGroup); ++r) {
    if (r == rows) continue;
    const std::int64_t row = queries.begin + r % queries.count;
    const std::int64_t at_head = head + r / queries.count;
    const Rows q(f.q, f.element, f.sizes.width, tile.share.batch, at_head);
    put_along(q.at(row, space), f.sizes.width, r, kTileRows, buffers.queries);
    const Rows dout(f.dout, f.element, f.sizes.value_width, tile.share.batch, at_head);
    put_along(dout.at(row, space), f.sizes.value_width, r, kTileRows, buffers.douts);
  }
  constexpr std::int64_t kBlocks = (kTileRows + M - 1) / M;
  std::int64_t los[kBlocks];
  std::int64_t his[kBlocks];
  std::int64_t lo = tile.keys.count;
  std::int64_t hi = 0;
  for (std::int64_t r = 0; r < padded; r += M) {
    const Block<M> block(f.rules, queries, tile.keys, head, heads, r);
    los[r / M] = block.lo;
    his[r / M] = block.hi;
    if (block.lo == block.hi) continue;
    lo = smaller(lo, block.lo);
    hi = larger(hi, block.hi);
  }
  if (lo >= hi) return;
  const std::int64_t begin = down(lo, kLanes);
  const std::int64_t end = up(hi + M, kLanes);  // the last M keys may go past those that are seen
  for (std::int64_t r = 0; r < padded; r += M) {
    const Block<M> block(f.rules, queries, tile.keys, head, heads, r);
    block_gradients<M>(tile, block, r, begin, end);
  }
  for (std::int64_t column = begin; column < hi; column += M) {
    std::int64_t first = rows;  // rows first .. past - 1 hold all that see any of these keys
    std::int64_t past = 0;
    for (std::int64_t r = 0; r < padded; r += M) {
      if (los[r / M] >= column + M || his[r / M] <= column) continue;
      first = smaller(first, r);
      past = smaller(r + M, rows);
    }
    if (first < past) {
      key_gradients<M>(tile, column, first / kGroup, groups(past) - first / kGroup);
    }
  }
}

std::int64_t backward_scratch(const Sizes& sizes) {
  BackwardBuffers buffers;
  return BackwardBuffers::lay_out(sizes, nullptr, &buffers);
}

// Adds `count` rows of a tile's gradient to the tensor's.
inline void add_rows(const float* from, std::int64_t wide, const Strided& x, const Share& share,
                     const Tile& keys, std::int64_t width) {
  for (std::int64_t j = 0; j < keys.count; ++j) {
    float* to = &at(x, share.batch, keys.begin + j, share.kv_head);
    for (std::int64_t k = 0; k < width; ++k) to[k] += from[j * wide + k];
  }
}

void backward(const Backward& f, const Share& share, float* scratch) {
  BackwardBuffers buffers;
  BackwardBuffers::lay_out(f.sizes, scratch, &buffers);
  const Rows key_rows(f.k, f.element, f.sizes.width, share.batch, share.kv_head);
  const Rows value_rows(f.v, f.element, f.sizes.value_width, share.batch, share.kv_head);
  const std::int64_t group = f.sizes.heads / f.sizes.kv_heads;
  const std::int64_t wide = up(f.sizes.width, kPanel);
  const std::int64_t value_wide = up(f.sizes.value_width, kPanel);
  for (std::int64_t t = share.k_part; t < f.plan.k_count; t += share.k_parts) {
    const Tile& keys = f.plan.k_tiles[t];
    const KeyTile tile{f, share, buffers, keys};
    bool packed = false;
    for (std::int64_t s = f.plan.first[t]; s < f.plan.first[t + 1]; ++s) {
      if (f.plan.seen[s] % share.q_parts != share.q_part) continue;
      if (!packed) {
        pack_across(key_rows, keys.begin, keys.count, buffers.keys_across);
        pack_across(value_rows, keys.begin, keys.count, buffers.values_across);
        pack_along(key_rows, keys.begin, keys.count, kBackwardColumns, buffers.keys);
        for (std::int64_t i = 0; i < (keys.count + kMostRows) * wide; ++i) buffers.dk[i] = 0;
        for (std::int64_t i = 0; i < (keys.count + kMostRows) * value_wide; ++i) buffers.dv[i] = 0;
        packed = true;
      }
      const Tile& queries = f.plan.q_tiles[f.plan.seen[s]];
      const std::int64_t together = smaller(larger(kTileRows / queries.count, 1), group);
      for (std::int64_t h = 0; h < group; h += together) {
        tile_gradients(tile, queries, share.kv_head * group + h, smaller(together, group - h));
      }
    }
    if (!packed) continue;
    add_rows(buffers.dk, wide, f.dk, share, keys, f.sizes.width);
    add_rows(buffers.dv, value_wide, f.dv, share, keys, f.sizes.value_width);
  }
}

}  // namespace
}  // namespace pyparallel::dist::attention
