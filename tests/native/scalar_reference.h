// reduce() one element at a time, written for reading: what every vector variant must equal bit for
// bit. 16-bit floats are converted by arithmetic in double (exact), not by the bit tricks under
// test.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "shm/reduce.h"

namespace reference {

using pyparallel::DType;
using pyparallel::ReduceOp;
using pyparallel::shm::ReduceArgs;

// A 16-bit float format: `fraction` stored bits of the significand, smallest normal 2^min_exponent.
template <int kFraction, int kMinExponent>
struct Narrow {
  std::uint16_t bits;
  static constexpr int fraction = kFraction;
  static constexpr std::uint16_t infinity = 0x7fff & ~((1 << kFraction) - 1);
  static constexpr std::uint16_t nan = infinity | 1 << (kFraction - 1);

  float value() const {
    const double sign = bits & 0x8000 ? -1 : 1;
    const int magnitude = bits & 0x7fff, part = magnitude & ((1 << fraction) - 1);
    const int exponent = magnitude >> fraction;
    if (magnitude > infinity) return std::numeric_limits<float>::quiet_NaN();
    if (magnitude == infinity) return static_cast<float>(sign * HUGE_VAL);
    const double significand = exponent == 0 ? part : part + (1 << fraction);
    const int power = (exponent == 0 ? 0 : exponent - 1) + kMinExponent - fraction;
    return static_cast<float>(sign * std::ldexp(significand, power));
  }

  // Nearest, ties to even: counted in units of the last place.
  static Narrow of(float x) {
    const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (x != x) return {nan};
    if (x == 0) return {sign};  // it has no exponent
    if (std::isinf(x)) return {static_cast<std::uint16_t>(sign | infinity)};
    int exponent = 0;
    std::frexp(std::fabs(static_cast<double>(x)), &exponent);
    exponent = std::max(exponent - 1, kMinExponent);
    const double units = std::ldexp(std::fabs(static_cast<double>(x)), fraction - exponent);
    const auto whole = static_cast<std::int64_t>(std::nearbyint(units));  // the default mode: even
    // A carry into the exponent field is the next binade, or infinity, by the format's design.
    const std::int64_t magnitude =
        (static_cast<std::int64_t>(exponent - kMinExponent) << fraction) + whole;
    return {static_cast<std::uint16_t>(sign | std::min<std::int64_t>(magnitude, infinity))};
  }
};
using Float16 = Narrow<10, -14>;
using Bfloat16 = Narrow<7, -126>;

template <class T>
struct Arithmetic {
  using Acc = T;
  static Acc load(T x) { return x; }
  static T store(Acc x) {
    if constexpr (std::is_floating_point_v<T>) {
      if (x != x) return std::numeric_limits<T>::quiet_NaN();
    }
    return x;
  }
};
template <int F, int E>
struct Arithmetic<Narrow<F, E>> {
  using Acc = float;
  static float load(Narrow<F, E> x) { return x.value(); }
  static Narrow<F, E> store(float x) { return Narrow<F, E>::of(x); }
};

// A volatile product cannot be fused into the sum that follows.
template <class T>
T times(T a, T b) {
  volatile T product = a * b;
  return product;
}

template <class Acc>
Acc combine(ReduceOp op, Acc a, Acc b) {
  if constexpr (std::is_floating_point_v<Acc>) {
    switch (op) {
      case ReduceOp::product:
        return times(a, b);
      case ReduceOp::min:
        return a != a || a < b ? a : b;
      case ReduceOp::max:
        return a != a || a > b ? a : b;
      default:
        return a + b;
    }
  } else {
    using U = std::make_unsigned_t<Acc>;
    const std::uint64_t x = static_cast<U>(a), y = static_cast<U>(b);
    switch (op) {
      case ReduceOp::product:
        return static_cast<Acc>(x * y);
      case ReduceOp::min:
        return a < b ? a : b;
      case ReduceOp::max:
        return a > b ? a : b;
      case ReduceOp::band:
        return static_cast<Acc>(x & y);
      case ReduceOp::bor:
        return static_cast<Acc>(x | y);
      case ReduceOp::bxor:
        return static_cast<Acc>(x ^ y);
      default:
        return static_cast<Acc>(x + y);
    }
  }
}

template <class T>
void reduce_as(const ReduceArgs& args) {
  using A = Arithmetic<T>;
  using Acc = typename A::Acc;
  for (std::size_t i = 0; i < args.count; ++i) {
    Acc acc{};
    for (int k = 0; k < args.n; ++k) {
      T element;
      std::memcpy(&element, static_cast<const char*>(args.inputs[k]) + i * sizeof(T), sizeof(T));
      Acc x = A::load(element);
      if constexpr (std::is_floating_point_v<Acc>) {
        if (args.op == ReduceOp::premul_sum) x = times(x, static_cast<Acc>(args.factors[k]));
      }
      acc = k == 0 ? x : combine(args.op, acc, x);
    }
    if (args.op == ReduceOp::avg) {
      if constexpr (std::is_floating_point_v<Acc>) {
        acc = acc / static_cast<Acc>(args.divisor);
      } else {
        acc = static_cast<Acc>(static_cast<std::int64_t>(acc) / args.divisor);
      }
    }
    const T result = A::store(acc);
    std::memcpy(static_cast<char*>(args.out) + i * sizeof(T), &result, sizeof(T));
    if (args.second_out) {
      std::memcpy(static_cast<char*>(args.second_out) + i * sizeof(T), &result, sizeof(T));
    }
  }
}

// Any non-zero byte is true.
inline void reduce_boolean(const ReduceArgs& args) {
  for (std::size_t i = 0; i < args.count; ++i) {
    bool acc = false;
    for (int k = 0; k < args.n; ++k) {
      const bool x = static_cast<const unsigned char*>(args.inputs[k])[i] != 0;
      const bool both =
          args.op == ReduceOp::product || args.op == ReduceOp::min || args.op == ReduceOp::band;
      acc = k == 0 ? x : both ? acc && x : args.op == ReduceOp::bxor ? acc != x : acc || x;
    }
    static_cast<unsigned char*>(args.out)[i] = acc;
    if (args.second_out) static_cast<unsigned char*>(args.second_out)[i] = acc;
  }
}

inline void reduce(const ReduceArgs& args) {
  switch (args.dtype) {
    case DType::f64:
      return reduce_as<double>(args);
    case DType::f32:
      return reduce_as<float>(args);
    case DType::f16:
      return reduce_as<Float16>(args);
    case DType::bf16:
      return reduce_as<Bfloat16>(args);
    case DType::i8:
      return reduce_as<std::int8_t>(args);
    case DType::i16:
      return reduce_as<std::int16_t>(args);
    case DType::i32:
      return reduce_as<std::int32_t>(args);
    case DType::i64:
      return reduce_as<std::int64_t>(args);
    case DType::u8:
      return reduce_as<std::uint8_t>(args);
    default:
      return reduce_boolean(args);
  }
}

}  // namespace reference
