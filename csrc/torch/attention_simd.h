// Vectors of the instruction set that the including file is compiled for. Everything is in an
// unnamed namespace: each of these files has its own.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace pyparallel::dist::attention {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kMostRows = 12;  // rows x 2 vectors of sums stay in registers
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kMostRows = 6;
#else
constexpr int kLanes = 4;
constexpr int kMostRows = 6;
#endif
constexpr int kPanel = 2 * kLanes;  // columns of a panel: see attention_products.h

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = std::int32_t __attribute__((vector_size(4 * kLanes)));
using Words = std::uint32_t __attribute__((vector_size(4 * kLanes)));
using Longs = std::uint64_t __attribute__((vector_size(8 * kLanes)));

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504088896340736F;
constexpr float kLn2 = 0.69314718055994530942F;

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline Floats all(float x) { return x - Floats{}; }  // not + : -0 stays -0

inline Ints bits(Floats x) { return (Ints)(x); }
inline Floats as_floats(Ints x) { return (Floats)(x); }

inline Ints lane_numbers() {
  Ints x;
  for (int i = 0; i < kLanes; ++i) x[i] = i;
  return x;
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float largest(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)(x));
#else
  float most = x[0];
  for (int i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

inline float sum(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)(x));
#else
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
#endif
}

// 2^x for x below 127; 0 below -126. Relative error 1.2e-7 at most: rounding, and a polynomial of
// degree 6 on -1/2 .. 1/2 that is off by 5e-9.
inline Floats exp2(Floats x) {
  constexpr float kShift = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = x + kShift;
  const Floats f = x - (shifted - kShift);
  Floats y = f * 1.545316295e-04F + 1.339086336e-03F;
  y = y * f + 9.618082557e-03F;
  y = y * f + 5.550357114e-02F;
  y = y * f + 2.402265076e-01F;
  y = y * f + 6.931471880e-01F;
  y = y * f + 1.0F;
  y = as_floats(bits(y) + (bits(shifted) << 23));
  return x < -126.0F ? Floats{} : y;
}

inline Floats tanh(Floats x) {
  const Floats size = x < 0 ? -x : x;
  const Floats square = x * x;
  // Near 0 the other form would cancel: the Taylor series, off by 2e-9 at 0.3.
  Floats y = square * -8.863235530e-03F + 2.186948854e-02F;
  y = y * square - 5.396825397e-02F;
  y = y * square + 1.333333333e-01F;
  y = y * square - 3.333333333e-01F;
  y = y * square * x + x;
  const Floats limited = size > 20.0F ? all(20.0F) : size;
  const Floats rest = 1.0F - 2.0F / (exp2(limited * (2 * kLog2E)) + 1.0F);
  return size < 0.3F ? y : (x < 0 ? -rest : rest);
}

// The first word of Philox4x32-10 (pyparallel/attention/dropout.py); lanes differ in counter 0.
inline Words philox(Words c0, std::uint32_t q_position, std::uint32_t document, std::uint32_t plane,
                    std::uint64_t seed) {
  Words c1 = q_position - Words{};
  Words c2 = document - Words{};
  Words c3 = plane - Words{};
  auto k0 = static_cast<std::uint32_t>(seed);
  auto k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Longs high = __builtin_convertvector(c0, Longs) * std::uint64_t{0xD2511F53};
    const Longs low = __builtin_convertvector(c2, Longs) * std::uint64_t{0xCD9E8D57};
    c0 = __builtin_convertvector(low >> 32, Words) ^ c1 ^ k0;
    c1 = __builtin_convertvector(low, Words);
    c2 = __builtin_convertvector(high >> 32, Words) ^ c3 ^ k1;
    c3 = __builtin_convertvector(high, Words);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return c0;
}

inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
// x >= 0.
inline std::int64_t down(std::int64_t x, std::int64_t step) { return x / step * step; }
inline std::int64_t up(std::int64_t x, std::int64_t step) { return (x + step - 1) / step * step; }

}  // namespace
}  // namespace pyparallel::dist::attention
