// Copies of rows of a tensor in the forms that attention_products.h multiplies, rounded up with
// zeros.
#pragma once

#include "torch/attention_kernels.h"
#include "torch/attention_products.h"

namespace pyparallel::dist::attention {
namespace {

constexpr std::int64_t kMostWidth = 256;            // of a row
constexpr std::int64_t kWideRow = kMostWidth + 16;  // rows one below the other share no cache sets

inline float half_to_float(std::uint16_t half) {
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  std::uint32_t word = static_cast<std::uint32_t>(half & 0x7FFFU) << 13;
  float value = 0;
  if (word >= 0x0F800000U) {  // infinite or not a number
    word |= 0x70000000U;
    std::memcpy(&value, &word, sizeof value);
  } else {
    std::memcpy(&value, &word, sizeof value);
    value *= 5.192296858534828e33F;  // 2^112: subnormal halves too
  }
  std::memcpy(&word, &value, sizeof word);
  word |= sign;
  std::memcpy(&value, &word, sizeof value);
  return value;
#endif
}

inline float bfloat_to_float(std::uint16_t value) {
  const std::uint32_t word = static_cast<std::uint32_t>(value) << 16;
  float x = 0;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

// What a group is made of.
#if defined(PYPARALLEL_ATTENTION_BF16)
using Value = std::uint16_t;
#else
using Value = float;
#endif

// Row `row` of one head as `width` values one after the other: the tensor's own memory, or `space`.
struct Rows {
  const Strided& x;
  Element element;
  std::int64_t width;
  std::int64_t base;

  Rows(const Strided& tensor, Element kind, std::int64_t columns, std::int64_t batch,
       std::int64_t head)
      : x(tensor), element(kind), width(columns), base(batch * tensor.batch + head * tensor.head) {}

  const Value* at(std::int64_t row, Value* space) const {
    const std::int64_t first = base + row * x.row;
#if defined(PYPARALLEL_ATTENTION_BF16)
    const auto* from = static_cast<const std::uint16_t*>(x.data) + first;
    if (x.column == 1) return from;
    for (std::int64_t i = 0; i < width; ++i) space[i] = from[i * x.column];
#else
    if (element == Element::f32) {
      const auto* from = static_cast<const float*>(x.data) + first;
      if (x.column == 1) return from;
      for (std::int64_t i = 0; i < width; ++i) space[i] = from[i * x.column];
      return space;
    }
    const auto* from = static_cast<const std::uint16_t*>(x.data) + first;
    if (element == Element::bf16 && x.column == 1) {
      for (std::int64_t i = 0; i < width; ++i) space[i] = bfloat_to_float(from[i]);
    } else if (element == Element::bf16) {
      for (std::int64_t i = 0; i < width; ++i) space[i] = bfloat_to_float(from[i * x.column]);
    } else if (x.column == 1) {
      std::int64_t i = 0;
#if defined(__AVX512F__)
      for (; i + kLanes <= width; i += kLanes) {
        const __m512 some = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u*)(from + i)));
        store(space + i, (Floats)(some));
      }
#endif
      for (; i < width; ++i) space[i] = half_to_float(from[i]);
    } else {
      for (std::int64_t i = 0; i < width; ++i) space[i] = half_to_float(from[i * x.column]);
    }
#endif
    return space;
  }
};

inline std::int64_t groups(std::int64_t values) { return (values + kGroup - 1) / kGroup; }

// `width` values as groups at `to`.
inline void put_row(const Value* from, std::int64_t width, float* to) {
  std::memcpy(to, from, static_cast<std::size_t>(width) * sizeof(Value));
  if (width % kGroup != 0) std::memset(reinterpret_cast<Value*>(to) + width, 0, sizeof(Value));
}

// b = rows^T for `product`: depth runs along the rows of x, columns are its rows.
inline void pack_across(const Rows& x, std::int64_t begin, std::int64_t count, float* to) {
  const std::int64_t depth = groups(x.width);
  alignas(64) Value space[kWideRow];
  alignas(64) float row[kWideRow];
  for (std::int64_t j = 0; j < up(count, kPanel); ++j) {
    float* panel = to + j / kPanel * kPanel * depth + j % kPanel;
    if (j < count) {
      const Value* from = x.at(begin + j, space);
      put_row(from, x.width, row);
      for (std::int64_t k = 0; k < depth; ++k) panel[k * kPanel] = row[k];
    } else {
      for (std::int64_t k = 0; k < depth; ++k) panel[k * kPanel] = 0;
    }
  }
}

// Rows as the depth of b for `add_product`, `i` being a row's number in it, of `most` in all.
// Columns past the width are zeros. Row i + 1 of the same group, if any, comes after row i.
inline void put_along(const Value* from, std::int64_t width, std::int64_t i, std::int64_t most,
                      float* to) {
  const std::int64_t depth = groups(most);
  for (std::int64_t column = 0; column < width; column += kPanel) {
    float* panel = to + column * depth + i / kGroup * kPanel;
    const std::int64_t count = smaller(width - column, kPanel);
#if defined(PYPARALLEL_ATTENTION_BF16)
    auto* words = reinterpret_cast<std::uint32_t*>(panel);
    const std::uint16_t* some = from + column;
    if (i % 2 == 0) {  // and zeros beside it
      for (std::int64_t k = 0; k < count; ++k) words[k] = some[k];
      for (std::int64_t k = count; k < kPanel; ++k) words[k] = 0;
    } else {
      for (std::int64_t k = 0; k < count; ++k) {
        words[k] |= static_cast<std::uint32_t>(some[k]) << 16;
      }
    }
#else
    for (std::int64_t k = 0; k < count; ++k) panel[k] = from[column + k];
    for (std::int64_t k = count; k < kPanel; ++k) panel[k] = 0;
#endif
  }
}

inline void pack_along(const Rows& x, std::int64_t begin, std::int64_t count, std::int64_t most,
                       float* to) {
  alignas(64) Value space[kWideRow];
  for (std::int64_t i = 0; i < count; ++i) {
    put_along(x.at(begin + i, space), x.width, i, most, to);
  }
}

#if defined(PYPARALLEL_ATTENTION_BF16)
// To nearest, ties to even.
inline void store_rounded(std::uint16_t* to, Floats x) {
  const __m256bh some = _mm512_cvtneps_pbh((__m512)(x));
  std::memcpy(to, &some, sizeof some);
}
#endif

}  // namespace
}  // namespace pyparallel::dist::attention
