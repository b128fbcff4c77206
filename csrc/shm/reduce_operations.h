// Element types and operations on vectors, for reduce_template.h, whose rules hold here too.
#pragma once

#include "shm/reduce.h"
#include "shm/reduce_vectors.h"

namespace {

using pyparallel::shm::ReduceArgs;

// --- element types: how kWidth bytes become `parts` vectors to calculate with, and back ---------

template <class T>
struct Plain {
  using V = typename VectorOf<T>::type;
  static constexpr int parts = 1;
  static constexpr std::size_t element = sizeof(T);
  static void unpack(Bytes raw, V (&out)[1]) { out[0] = (V)raw; }
  static Bytes pack(const V (&in)[1]) { return (Bytes)in[0]; }
};

// Any non-zero byte is true; results are 0 and 1.
struct Boolean : Plain<std::uint8_t> {
  static void unpack(Bytes raw, V (&out)[1]) { out[0] = (V)(raw != 0) & 1; }
};

// Every second element in each part: no shuffle is needed, and the order within does not matter.
struct Bfloat {
  using V = Floats;
  static constexpr int parts = 2;
  static constexpr std::size_t element = 2;
  static void unpack(Bytes raw, V (&out)[2]) {
    out[0] = (V)((Words)raw << 16);
    out[1] = (V)((Words)raw & 0xffff0000u);
  }
  // The inputs hold no NaN but the canonical one, so the carry cannot turn a NaN into an infinity.
  static Words rounded(V x) {
    const Words bits = (Words)x;
    return bits + 0x7fff + ((bits >> 16) & 1);
  }
  static Bytes pack(const V (&in)[2]) {
    return (Bytes)((rounded(in[0]) >> 16) | (rounded(in[1]) & 0xffff0000u));
  }
};

// NaN results are the canonical quiet NaN: which payload survives a + b depends on the order in
// which a compiler hands the operands to the instruction. Other types pass through.
template <class V>
inline V canonical(V x) {
  if constexpr (Lane<V>::floating) {
    return x == x ? x : splat<V>(static_cast<typename Lane<V>::type>(__builtin_nan("")));
  } else {
    return x;
  }
}

// --- operations: first(input 0), next(so far, input k), last(so far) -----------------------------

struct Fold {
  static constexpr bool special_cases = false;
  explicit Fold(const ReduceArgs&) {}
  template <class V>
  V first(V x) const {
    return x;
  }
  template <class V>
  V last(V acc) const {
    return acc;
  }
};

struct Sum : Fold {
  static constexpr bool special_cases = true;  // worth a loop each for 2, 3 and 4 inputs
  using Fold::Fold;
  template <class V>
  V next(V acc, V x, int) const {
    return acc + x;
  }
};

struct Product : Fold {
  using Fold::Fold;
  template <class V>
  V next(V acc, V x, int) const {
    return acc * x;
  }
};

// A NaN on either side wins: the comparison with a NaN x is false and gives x.
struct Min : Fold {
  using Fold::Fold;
  template <class V>
  V next(V acc, V x, int) const {
    return (acc < x) | (acc != acc) ? acc : x;
  }
};

struct Max : Fold {
  using Fold::Fold;
  template <class V>
  V next(V acc, V x, int) const {
    return (acc > x) | (acc != acc) ? acc : x;
  }
};

struct And : Fold {
  using Fold::Fold;
  template <class V>
  V next(V acc, V x, int) const {
    return acc & x;
  }
};

struct Or : Fold {
  using Fold::Fold;
  template <class V>
  V next(V acc, V x, int) const {
    return acc | x;
  }
};

struct Xor : Fold {
  using Fold::Fold;
  template <class V>
  V next(V acc, V x, int) const {
    return acc ^ x;
  }
};

struct Average : Fold {
  explicit Average(const ReduceArgs& args) : Fold(args), divisor(args.divisor) {}
  template <class V>
  V next(V acc, V x, int) const {
    if constexpr (Lane<V>::floating) {
      return acc + x;
    } else {  // the sign counts only in the division: the sum wraps
      using Unsigned = typename VectorOf<std::make_unsigned_t<typename Lane<V>::type>>::type;
      return (V)((Unsigned)acc + (Unsigned)x);
    }
  }
  template <class V>
  V last(V acc) const {
    using T = typename Lane<V>::type;
    if constexpr (Lane<V>::floating) {
      return acc / splat<V>(static_cast<T>(divisor));
    } else {
      // By floating point where that is exact (a quotient of such integers is never rounded across
      // an integer), because no CPU divides vectors of integers. int64 has no such type.
      using Exact = std::conditional_t<sizeof(T) <= 2, float, double>;
      T lanes[sizeof(V) / sizeof(T)];
      std::memcpy(lanes, &acc, sizeof(acc));
      for (T& x : lanes) {
        if constexpr (sizeof(T) == 8) {
          x /= divisor;
        } else {
          x = static_cast<T>(static_cast<int>(static_cast<Exact>(x) / static_cast<Exact>(divisor)));
        }
      }
      std::memcpy(&acc, lanes, sizeof(acc));
      return acc;
    }
  }
  int divisor;
};

struct PremulSum {
  static constexpr bool special_cases = false;
  explicit PremulSum(const ReduceArgs& args) : factors(args.factors) {}
  template <class V>
  V scaled(V x, int k) const {
    return x * splat<V>(static_cast<typename Lane<V>::type>(factors[k]));
  }
  template <class V>
  V first(V x) const {
    return scaled(x, 0);
  }
  template <class V>
  V next(V acc, V x, int k) const {
    return acc + scaled(x, k);
  }
  template <class V>
  V last(V acc) const {
    return acc;
  }
  const double* factors;
};

}  // namespace
