// The kernels of few_rows.h for AVX-512; compiled for it, so nothing but intrinsics is included.
//
// Tiles of 4 rows of x by 4 rows of the weight, whose sums stay in registers over the whole of K. A
// block of the weight is read from memory by the first tile and from the cache by the others, which
// meanwhile fetch the next block. Sums are in float32, in 16 lanes (of two products each for
// bfloat16) that are added up at the end, in an order that depends on K alone: a row's result does
// not depend on the other rows.
#include "torch/few_rows_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

namespace pyparallel::dist {
namespace {

constexpr int kTile = 4;

// How one type is multiplied: elements to a vector, a step of a tile, and what a sum is rounded to.
struct F32 {
  using Element = float;
  using Mask = __mmask16;
  static constexpr std::int64_t kLanes = 16;

  template <int M, int N>
  __attribute__((always_inline)) static void step(const float* x, const float* w, std::int64_t k,
                                                  Mask mask, __m512 (&sums)[M][N]) {
    __m512 rows[M];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) rows[i] = _mm512_maskz_loadu_ps(mask, x + i * k);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const __m512 weight = _mm512_maskz_loadu_ps(mask, w + j * k);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) sums[i][j] = _mm512_fmadd_ps(rows[i], weight, sums[i][j]);
    }
  }

  static float rounded(float value) { return value; }
};

struct BF16 {
  using Element = std::uint16_t;
  using Mask = __mmask32;
  static constexpr std::int64_t kLanes = 32;

  template <int M, int N>
  __attribute__((always_inline)) static void step(const Element* x, const Element* w,
                                                  std::int64_t k, Mask mask, __m512 (&sums)[M][N]) {
    __m512bh rows[M];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      rows[i] = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + i * k);
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const __m512bh weight = (__m512bh)_mm512_maskz_loadu_epi16(mask, w + j * k);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], rows[i], weight);
    }
  }

  // To nearest, ties to even; a NaN stays one.
  static Element rounded(float value) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return static_cast<Element>((bits >> 16) | 0x40);
    return static_cast<Element>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
};

// y [M, N] = M rows of x against N rows of the weight; `ahead` is fetched meanwhile, unless null.
template <class Kernel, int M, int N, class Element>
void tile(const Element* x, const Element* w, Element* y, const FewRows& s, const Element* ahead) {
  using Mask = typename Kernel::Mask;
  __m512 sums[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sums[i][j] = _mm512_setzero_ps();
  }
  std::int64_t at = 0;
  for (; at + Kernel::kLanes <= s.k; at += Kernel::kLanes) {
    if (ahead != nullptr) _mm_prefetch(reinterpret_cast<const char*>(ahead + at), _MM_HINT_T1);
    Kernel::template step<M, N>(x + at, w + at, s.k, static_cast<Mask>(~Mask{0}), sums);
  }
  if (at < s.k) {
    const Mask left = static_cast<Mask>((Mask{1} << (s.k - at)) - 1);
    Kernel::template step<M, N>(x + at, w + at, s.k, left, sums);
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      y[i * s.n + j] = Kernel::rounded(_mm512_reduce_add_ps(sums[i][j]));
    }
  }
}

// The rows of x against N rows of the weight; `next` is the block after it, or null.
template <class Kernel, int N, class Element>
void block(const Element* x, const Element* w, Element* y, const FewRows& s, const Element* next) {
  std::int64_t row = 0;
  for (; row + kTile <= s.m; row += kTile) {
    const Element* ahead = next == nullptr ? nullptr : next + (row / kTile) % N * s.k;
    tile<Kernel, kTile, N>(x + row * s.k, w, y + row * s.n, s, ahead);
  }
  x += row * s.k;
  y += row * s.n;
  switch (s.m - row) {
    case 3:
      return tile<Kernel, 3, N, Element>(x, w, y, s, nullptr);
    case 2:
      return tile<Kernel, 2, N, Element>(x, w, y, s, nullptr);
    case 1:
      return tile<Kernel, 1, N, Element>(x, w, y, s, nullptr);
    default:
      return;
  }
}

template <class Kernel, class Element>
void all_blocks(const Element* x, const Element* w, Element* y, const FewRows& s) {
  const Element* none = nullptr;
  std::int64_t column = 0;
  for (; column + kTile <= s.n; column += kTile) {
    const bool more = s.m > kTile && column + 2 * kTile <= s.n;
    const Element* next = more ? w + (column + kTile) * s.k : none;
    block<Kernel, kTile>(x, w + column * s.k, y + column, s, next);
  }
  for (; column < s.n; ++column) block<Kernel, 1>(x, w + column * s.k, y + column, s, none);
}

}  // namespace

void product_f32(const float* x, const float* w, float* y, const FewRows& s) {
  all_blocks<F32>(x, w, y, s);
}

void product_bf16(const std::uint16_t* x, const std::uint16_t* w, std::uint16_t* y,
                  const FewRows& s) {
  all_blocks<BF16>(x, w, y, s);
}

}  // namespace pyparallel::dist
#endif
