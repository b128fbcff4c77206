// Element types and reductions: the vocabulary that every room of the core shares.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyparallel {

// Values are part of the C ABI (pyparallel.h) and of the wire headers: append only.
enum class DType : std::uint8_t { f64, f32, f16, bf16, i8, i16, i32, i64, u8, boolean, count_ };

// Integers wrap modulo 2^bits, as torch does on the same dtype; avg of integers truncates towards
// zero after the (wrapped) sum. boolean: sum and max are OR, product and min are AND, avg is
// refused. premul_sum multiplies each rank's input by that rank's own factor before the sum
// (floating point only). band/bor/bxor are for integers and boolean. min/max propagate NaN.
enum class ReduceOp : std::uint8_t {
  sum,
  avg,
  min,
  max,
  product,
  premul_sum,
  band,
  bor,
  bxor,
  count_
};

constexpr std::size_t size_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
      return 2;
    default:
      return 1;
  }
}

constexpr bool is_floating(DType t) { return t <= DType::bf16; }

constexpr const char* name_of(DType t) {
  constexpr const char* names[] = {"float64", "float32", "float16", "bfloat16", "int8",
                                   "int16",   "int32",   "int64",   "uint8",    "bool"};
  return t < DType::count_ ? names[static_cast<int>(t)] : "unknown dtype";
}

constexpr const char* name_of(ReduceOp op) {
  constexpr const char* names[] = {"sum",        "avg",  "min", "max", "product",
                                   "premul_sum", "band", "bor", "bxor"};
  return op < ReduceOp::count_ ? names[static_cast<int>(op)] : "unknown reduction";
}

// Whether the reduction is defined on the type (see the notes at ReduceOp).
constexpr bool is_defined(ReduceOp op, DType t) {
  switch (op) {
    case ReduceOp::avg:
      return t != DType::boolean;
    case ReduceOp::premul_sum:
      return is_floating(t);
    case ReduceOp::band:
    case ReduceOp::bor:
    case ReduceOp::bxor:
      return !is_floating(t);
    default:
      return op < ReduceOp::count_ && t < DType::count_;
  }
}

}  // namespace pyparallel
