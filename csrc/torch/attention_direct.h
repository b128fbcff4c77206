// Forward for very few rows of q, as decoding has them: bound by reading k and v, so these are read
// once, as they lie, instead of being packed for products that would hardly use them.
#pragma once

#include "torch/attention_rows.h"

namespace pyparallel::dist::attention {
namespace {

#if !defined(PYPARALLEL_ATTENTION_BF16)

// Rows of floats: a tensor's own, or what a tile's rows were converted to.
struct Matrix {
  const float* first;
  std::int64_t stride;

  Matrix(const Rows& x, std::int64_t begin, std::int64_t count, float* space) {
    if (x.element == Element::f32 && x.x.column == 1) {
      first = x.at(begin, nullptr);
      stride = x.x.row;
      return;
    }
    first = space;
    stride = up(x.width, kPanel);
    for (std::int64_t i = 0; i < count; ++i) x.at(begin + i, space + i * stride);
  }

  const float* row(std::int64_t i) const { return first + i * stride; }
};

// Scores of M rows of q with N keys from key `j` on.
template <int M, int N, std::int64_t kWide>
inline void dot_products(const float* queries, const Matrix& keys, std::int64_t width,
                         std::int64_t j, float* scores) {
  Floats sums[M][N] = {};
  for (std::int64_t k = 0; k < width; k += kLanes) {
    Floats left[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) left[m] = load(queries + m * kWideRow + k);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Floats right = load_part(keys.row(j + n) + k, width - k);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sums[m][n] += left[m] * right;
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) scores[m * kWide + j + n] = sum(sums[m][n]);
  }
}

// scores = q k^T of M rows, for keys begin .. end - 1. Queries are zeros up to a whole vector.
template <int M, std::int64_t kWide>
inline void direct_scores(const float* queries, const Matrix& keys, std::int64_t width,
                          std::int64_t begin, std::int64_t end, float* scores) {
  std::int64_t j = begin;
  for (; j + 4 <= end; j += 4) dot_products<M, 4, kWide>(queries, keys, width, j, scores);
  for (; j < end; ++j) dot_products<M, 1, kWide>(queries, keys, width, j, scores);
}

template <int M, int N, std::int64_t kWide>
inline void direct_columns(const float* weights, const Matrix& values, std::int64_t begin,
                           std::int64_t end, std::int64_t column, std::int64_t count,
                           float* const (&rows)[M], const float (&factors)[M]) {
  Floats sums[M][N] = {};
  for (std::int64_t j = begin; j < end; ++j) {
    Floats right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      right[n] = load_part(values.row(j) + column + n * kLanes, count - n * kLanes);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const float left = weights[m * kWide + j];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] += left * right[n];
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* to = rows[m] + column + n * kLanes;
      const std::int64_t there = count - n * kLanes;
      store_part(to, load_part(to, there) * factors[m] + sums[m][n], there);
    }
  }
}

// rows = factors * rows + weights v, over keys begin .. end - 1.
template <int M, std::int64_t kWide>
inline void add_direct(const float* weights, const Matrix& values, std::int64_t begin,
                       std::int64_t end, std::int64_t width, float* const (&rows)[M],
                       const float (&factors)[M]) {
  std::int64_t column = 0;
  for (; column + 4 * kLanes <= width; column += 4 * kLanes) {
    direct_columns<M, 4, kWide>(weights, values, begin, end, column, 4 * kLanes, rows, factors);
  }
  for (; column < width; column += kLanes) {
    const std::int64_t count = smaller(width - column, kLanes);
    direct_columns<M, 1, kWide>(weights, values, begin, end, column, count, rows, factors);
  }
}

#endif

}  // namespace
}  // namespace pyparallel::dist::attention
