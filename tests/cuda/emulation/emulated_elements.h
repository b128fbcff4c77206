// The host's conversions and switch: what csrc/cuda/elements.h takes from CUDA.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cuda/elements.h"

namespace pyparallel::cuda {

inline float to_float(BFloat16 x) {
  const std::uint32_t bits = std::uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void from_float(float x, BFloat16* out) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (std::isnan(x)) {
    out->bits = 0x7fff;
  } else {
    out->bits = static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

inline float to_float(Half x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const float sign = x.bits >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}

inline void from_float(float x, Half* out) {
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (std::isnan(x)) {
    out->bits = 0x7fff;
  } else if (size >= 65520.0f) {
    out->bits = sign | 0x7c00;
  } else if (size == 0) {
    out->bits = sign;
  } else {
    const int exponent = std::max(std::ilogb(size), -14);
    // In units of the last place; the tie goes to even. A carry runs into the exponent by itself.
    const int units = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
    out->bits = static_cast<std::uint16_t>(sign | (((exponent + 14) << 10) + units));
  }
}

// A switch that begins with another rank for every 16 bytes: nobody may count on its order.
template <typename T>
order::Bits128 multimem_sum(const Multicast& m, std::size_t offset, T) {
  float sum[Pack<T>::size] = {};
  const std::uint32_t first = static_cast<std::uint32_t>(offset / sizeof(Pack<T>)) % m.world;
  for (std::uint32_t n = 0; n < m.world; ++n) {
    const char* memory = static_cast<const char*>(m.peers[(first + n) % m.world]) + offset;
    const Pack<T> p = *reinterpret_cast<const Pack<T>*>(memory);
    for (int k = 0; k < Pack<T>::size; ++k) sum[k] += to_float(p.get(k));
  }
  Pack<T> p{};
  for (int k = 0; k < Pack<T>::size; ++k) {
    T rounded;
    from_float(sum[k], &rounded);
    p.set(k, rounded);
  }
  order::Bits128 bits;
  std::memcpy(&bits, &p, sizeof bits);
  return bits;
}

}  // namespace pyparallel::cuda
