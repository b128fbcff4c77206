// The matrix products of attention_*.h: c [M, columns] = factor * c + a [M, depth] * b [depth,
// columns].
//
// Operands are 32-bit groups: one float, or two bfloat16 that are neighbours in depth. b lies in
// panels of kPanel columns: panel, depth, column. a lies anyhow, at strides known when compiled. A
// tile of M rows and N vectors stays in registers over the whole depth.
#pragma once

#include "torch/attention_simd.h"

namespace pyparallel::dist::attention {
namespace {

#if defined(PYPARALLEL_ATTENTION_BF16)
constexpr std::int64_t kGroup = 2;

inline Floats multiply_add(float a, Floats b, Floats c) {
  const auto pairs = (__m512bh)_mm512_set1_ps(a);
  return (Floats)_mm512_dpbf16_ps((__m512)c, pairs, (__m512bh)b);
}
#else
constexpr std::int64_t kGroup = 1;

inline Floats multiply_add(float a, Floats b, Floats c) { return a * b + c; }
#endif

// sums[m][n] += a[m] * b[n] over `depth` groups; a is at m * kRow + k * kDepth.
template <int M, int N, std::int64_t kRow, std::int64_t kDepth>
__attribute__((always_inline)) inline void accumulate(const float* a, const float* b,
                                                      std::int64_t depth, Floats (&sums)[M][N]) {
#pragma GCC unroll 2
  for (std::int64_t k = 0; k < depth; ++k) {
    Floats right[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) right[n] = load(b + k * kPanel + n * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const float left = a[m * kRow + k * kDepth];
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) sums[m][n] = multiply_add(left, right[n], sums[m][n]);
    }
  }
}

// Columns begin .. end - 1 of c = a * b, rounded outwards to whole vectors; begin is a multiple of
// kLanes. Row m of c is at m * kWide.
template <int M, std::int64_t kWide, std::int64_t kRow, std::int64_t kDepth>
inline void product(const float* a, const float* b, std::int64_t depth, std::int64_t begin,
                    std::int64_t end, float* c) {
  for (std::int64_t column = begin; column < end;) {
    const float* panel = b + column / kPanel * kPanel * depth + column % kPanel;
    if (column % kPanel == 0 && column + kLanes < end) {
      Floats sums[M][2] = {};
      accumulate<M, 2, kRow, kDepth>(a, panel, depth, sums);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        store(c + m * kWide + column, sums[m][0]);
        store(c + m * kWide + column + kLanes, sums[m][1]);
      }
      column += kPanel;
    } else {
      Floats sums[M][1] = {};
      accumulate<M, 1, kRow, kDepth>(a, panel, depth, sums);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) store(c + m * kWide + column, sums[m][0]);
      column += kLanes;
    }
  }
}

// The vector at `from`, of which only `count` floats exist.
inline Floats load_part(const float* from, std::int64_t count) {
  if (count >= kLanes) return load(from);
  Floats x = {};
  std::memcpy(&x, from, static_cast<std::size_t>(count) * sizeof(float));
  return x;
}

inline void store_part(float* to, Floats x, std::int64_t count) {
  if (count >= kLanes) return store(to, x);
  std::memcpy(to, &x, static_cast<std::size_t>(count) * sizeof(float));
}

template <int M, int N, std::int64_t kRow, std::int64_t kDepth>
inline void add_columns(const float* a, const float* b, std::int64_t depth, std::int64_t column,
                        std::int64_t count, float* const (&c)[M], const float (&factor)[M]) {
  Floats sums[M][N] = {};
  accumulate<M, N, kRow, kDepth>(a, b, depth, sums);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      float* to = c[m] + column + n * kLanes;
      const std::int64_t there = count - n * kLanes;
      store_part(to, load_part(to, there) * factor[m] + sums[m][n], there);
    }
  }
}

// c = factor * c + a * b, summed by itself before it is added: one sum over all tiles would lose
// digits with the length of the sequence. b's panels have `rows` groups of depth, of which the
// `depth` from `b` on count. c has `columns` columns, of rows anywhere.
template <int M, std::int64_t kRow, std::int64_t kDepth>
inline void add_product(const float* a, const float* b, std::int64_t rows, std::int64_t depth,
                        std::int64_t columns, float* const (&c)[M], const float (&factor)[M]) {
  std::int64_t column = 0;
  for (; column + kPanel <= columns; column += kPanel) {
    add_columns<M, 2, kRow, kDepth>(a, b + column * rows, depth, column, kPanel, c, factor);
  }
  for (; column < columns; column += kLanes) {
    const float* panel = b + column / kPanel * kPanel * rows + column % kPanel;
    const std::int64_t count = smaller(columns - column, kLanes);
    add_columns<M, 1, kRow, kDepth>(a, panel, depth, column, count, c, factor);
  }
}

}  // namespace
}  // namespace pyparallel::dist::attention
