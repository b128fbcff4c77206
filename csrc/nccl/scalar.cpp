#include "nccl/scalar.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/error.h"

namespace pyparallel::nccl {
namespace {

// A binary floating-point format: sign, `exponent` bits, `mantissa` bits.
struct Format {
  int exponent;
  int mantissa;
  bool finite_only;  // no infinity; the all-ones pattern alone is NaN (float8_e4m3fn)
};

std::uint32_t encode(double value, Format f) {
  const int bias = (1 << (f.exponent - 1)) - 1;
  const std::uint32_t sign = std::signbit(value) ? 1U << (f.exponent + f.mantissa) : 0;
  const std::uint32_t ones = (1U << (f.exponent + f.mantissa)) - 1;  // exponent and mantissa
  const std::uint32_t infinity = ((1U << f.exponent) - 1) << f.mantissa;
  if (std::isnan(value)) return sign | (f.finite_only ? ones : infinity | 1U << (f.mantissa - 1));
  const double magnitude = std::fabs(value);
  const std::uint32_t overflow = f.finite_only ? ones : infinity;
  if (std::isinf(value)) return sign | overflow;
  if (magnitude == 0) return sign;

  int power = std::ilogb(magnitude);
  if (power < 1 - bias) power = 1 - bias;  // subnormal: the spacing of the smallest normal numbers
  const double steps = std::nearbyint(std::ldexp(magnitude, f.mantissa - power));
  // `steps` counts spacings of this binade; rounding up into the next one carries by itself.
  const double bits = steps + std::ldexp(static_cast<double>(power + bias - 1), f.mantissa);
  const double largest = f.finite_only ? ones - 1 : infinity - 1;
  return sign | (bits > largest ? overflow : static_cast<std::uint32_t>(bits));
}

template <typename Bits>
Scalar store(Bits bits) {
  Scalar scalar;
  std::memcpy(scalar.bytes, &bits, sizeof bits);
  return scalar;
}

}  // namespace

Scalar Scalar::of(double value, const Element& element) {
  if (element.reducible && !element.boolean) {
    switch (element.type) {
      case DataType::f64:
        return store(value);
      case DataType::f32:
        return store(static_cast<float>(value));
      case DataType::f16:
        return store(static_cast<std::uint16_t>(encode(value, {5, 10, false})));
      case DataType::bf16:
        return store(static_cast<std::uint16_t>(encode(value, {8, 7, false})));
      case DataType::f8e4m3:
        return store(static_cast<std::uint8_t>(encode(value, {4, 3, true})));
      case DataType::f8e5m2:
        return store(static_cast<std::uint8_t>(encode(value, {5, 2, false})));
      default:
        break;
    }
  }
  throw InvalidArgument(
      str("premul_sum multiplies by a fraction: it is for floating types, not ", element.name));
}

}  // namespace pyparallel::nccl
