// Reductions of the stand-in: in rank order, small floats in double and rounded once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "nccl/abi.h"

namespace standin {

using pyparallel::nccl::DataType;
using pyparallel::nccl::RedOp;

inline std::size_t size_of(DataType type) {
  constexpr std::size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[static_cast<int>(type)];
}

// A small binary float, by the table of all its values.
class SmallFloat {
 public:
  SmallFloat(int exponent, int mantissa, bool finite_only) : bits_(exponent + mantissa) {
    const int bias = (1 << (exponent - 1)) - 1;
    for (int code = 0; code < 1 << bits_; ++code) {
      const int e = code >> mantissa, m = code & ((1 << mantissa) - 1);
      const bool special = finite_only ? code == (1 << bits_) - 1 : e == (1 << exponent) - 1;
      if (special) break;  // infinities and NaN: not in these tests
      const double fraction = std::ldexp(m, -mantissa);
      values_.push_back(e == 0 ? std::ldexp(fraction, 1 - bias)
                               : std::ldexp(1 + fraction, e - bias));
    }
  }
  double decode(unsigned code) const {
    const double value = values_[code & ((1U << bits_) - 1)];
    return code >> bits_ ? -value : value;
  }
  unsigned encode(double value) const {
    const double magnitude = std::fabs(value);
    auto above = std::lower_bound(values_.begin(), values_.end(), magnitude);
    if (above == values_.end()) --above;
    unsigned code = static_cast<unsigned>(above - values_.begin());
    if (code > 0) {
      const double up = *above - magnitude, down = magnitude - values_[code - 1];
      if (down < up || (down == up && code % 2 == 1)) --code;
    }
    return code | (std::signbit(value) ? 1U << bits_ : 0);
  }

 private:
  int bits_;
  std::vector<double> values_;  // of the positive codes, ascending
};

inline const SmallFloat& small_float(DataType type) {
  static const SmallFloat half(5, 10, false), brain(8, 7, false), e4m3(4, 3, true),
      e5m2(5, 2, false);
  switch (type) {
    case DataType::f16:
      return half;
    case DataType::bf16:
      return brain;
    case DataType::f8e4m3:
      return e4m3;
    default:
      return e5m2;
  }
}

// How an element type is read into a wide number and written back.
template <typename T, typename W>
struct Plain {
  W load(const char* bytes, std::size_t i) const {
    T value;
    std::memcpy(&value, bytes + i * sizeof value, sizeof value);
    return static_cast<W>(value);
  }
  void store(char* bytes, std::size_t i, W wide) const {
    const T value = static_cast<T>(wide);
    std::memcpy(bytes + i * sizeof value, &value, sizeof value);
  }
};

template <typename Bits>
struct Small {
  const SmallFloat& format;
  double load(const char* bytes, std::size_t i) const {
    return format.decode(Plain<Bits, unsigned>().load(bytes, i));
  }
  void store(char* bytes, std::size_t i, double wide) const {
    Plain<Bits, unsigned>().store(bytes, i, format.encode(wide));
  }
};

template <typename Use>
void with_codec(DataType type, Use use) {
  switch (type) {
    case DataType::i8:
      return use(Plain<std::int8_t, std::int64_t>());
    case DataType::u8:
      return use(Plain<std::uint8_t, std::uint64_t>());
    case DataType::i32:
      return use(Plain<std::int32_t, std::int64_t>());
    case DataType::u32:
      return use(Plain<std::uint32_t, std::uint64_t>());
    case DataType::i64:
      return use(Plain<std::int64_t, std::int64_t>());
    case DataType::u64:
      return use(Plain<std::uint64_t, std::uint64_t>());
    case DataType::f32:
      return use(Plain<float, double>());
    case DataType::f64:
      return use(Plain<double, double>());
    case DataType::f16:
    case DataType::bf16:
      return use(Small<std::uint16_t>{small_float(type)});
    default:
      return use(Small<std::uint8_t>{small_float(type)});
  }
}

template <typename W>
W combine(W a, W b, RedOp op) {
  switch (op) {
    case RedOp::product:
      return a * b;
    case RedOp::max:
      return std::max(a, b);
    case RedOp::min:
      return std::min(a, b);
    default:
      return a + b;
  }
}

// out = inputs[0] op inputs[1] op ...
inline void reduce(const std::vector<std::vector<char>>& inputs, char* out, std::size_t count,
                   DataType type, RedOp op) {
  with_codec(type, [&](auto codec) {
    for (std::size_t i = 0; i < count; ++i) {
      auto sum = codec.load(inputs[0].data(), i);
      for (std::size_t r = 1; r < inputs.size(); ++r) {
        sum = combine(sum, codec.load(inputs[r].data(), i), op);
      }
      if (op == RedOp::avg) sum = sum / static_cast<decltype(sum)>(inputs.size());
      codec.store(out, i, sum);
    }
  });
}

// The number that a scalar of that type holds.
inline double scalar_of(const void* bytes, DataType type) {
  double value = 0;
  with_codec(type, [&](auto codec) {
    value = static_cast<double>(codec.load(static_cast<const char*>(bytes), 0));
  });
  return value;
}

inline void scale(char* bytes, std::size_t count, DataType type, double factor) {
  with_codec(type, [&](auto codec) {
    for (std::size_t i = 0; i < count; ++i) {
      using W = decltype(codec.load(bytes, i));
      codec.store(bytes, i, static_cast<W>(static_cast<double>(codec.load(bytes, i)) * factor));
    }
  });
}

}  // namespace standin
