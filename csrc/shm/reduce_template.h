// The arithmetic of reduce.h over vectors of kWidth bytes. Compiled once per instruction set: each
// reduce_<set>.cpp includes reduce_vectors.h, defines in an unnamed namespace what differs, then
// includes this file:
//
//   void stream(std::byte* aligned, Bytes)     non-temporal store
//   void stream_fence()                        orders those before later stores
//   struct Half                                float16; the same members as Bfloat below
//
// Everything here lives in the includer's unnamed namespace, and nothing inline from other headers
// may be called (memcpy apart, which the compiler expands): the linker keeps one copy of an inline
// function, and if that were the one compiled for AVX-512 an older CPU would meet it elsewhere.
// Compiled without contraction (-ffp-contract=off): a * b + c must round twice on every set.
#pragma once

#include "shm/reduce_kernels.h"
#include "shm/reduce_operations.h"

namespace {

using pyparallel::DType;
using pyparallel::ReduceOp;
using pyparallel::shm::ReduceArgs;
using pyparallel::shm::Store;

// --- the loop -----------------------------------------------------------------------------------

// The sanitizers do not see a non-temporal store: there it is an ordinary one.
inline void store_streamed(std::byte* aligned, Bytes raw) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  store(aligned, raw);
#else
  stream(aligned, raw);
#endif
}

// `kVectors` vectors at byte `at` of every array: all inputs are read before an output is written
// (an output may be an input), the sums stay in registers. N is the number of inputs, 0 where it is
// known only at run time.
template <class Type, class Op, int N, int kVectors>
inline void tile(const ReduceArgs& args, const Op& op, std::size_t at, bool streamed,
                 bool second_streamed) {
  typename Type::V acc[kVectors][Type::parts];
  const auto input = [&](int k) { return static_cast<const std::byte*>(args.inputs[k]) + at; };
  const int n = N != 0 ? N : args.n;
  const std::byte* first = input(0);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    Type::unpack(load(first + v * kWidth), acc[v]);
    for (auto& part : acc[v]) part = op.first(part);
  }
#pragma GCC unroll 4
  for (int k = 1; k < n; ++k) {
    const std::byte* in = input(k);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      typename Type::V x[Type::parts];
      Type::unpack(load(in + v * kWidth), x);
      for (int p = 0; p < Type::parts; ++p) acc[v][p] = op.next(acc[v][p], x[p], k);
    }
  }
  std::byte* out = static_cast<std::byte*>(args.out) + at;
  std::byte* second = args.second_out ? static_cast<std::byte*>(args.second_out) + at : nullptr;
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    for (auto& part : acc[v]) part = canonical(op.last(part));
    const Bytes raw = Type::pack(acc[v]);
    if (streamed) {
      store_streamed(out + v * kWidth, raw);
    } else {
      store(out + v * kWidth, raw);
    }
    if (!second) continue;
    if (second_streamed) {
      store_streamed(second + v * kWidth, raw);
    } else {
      store(second + v * kWidth, raw);
    }
  }
}

// The `bytes` (fewer than kWidth) at `at`.
template <class Type, class Op>
__attribute__((noinline)) void tile_part(const ReduceArgs& args, const Op& op, std::size_t at,
                                         std::size_t bytes) {
  typename Type::V acc[Type::parts];
  const auto input = [&](int k) { return static_cast<const std::byte*>(args.inputs[k]) + at; };
  Type::unpack(load_part(input(0), bytes), acc);
  for (auto& part : acc) part = op.first(part);
  for (int k = 1; k < args.n; ++k) {
    typename Type::V x[Type::parts];
    Type::unpack(load_part(input(k), bytes), x);
    for (int p = 0; p < Type::parts; ++p) acc[p] = op.next(acc[p], x[p], k);
  }
  for (auto& part : acc) part = canonical(op.last(part));
  const Bytes raw = Type::pack(acc);
  store_part(static_cast<std::byte*>(args.out) + at, raw, bytes);
  if (args.second_out) store_part(static_cast<std::byte*>(args.second_out) + at, raw, bytes);
}

inline std::size_t bytes_to_alignment(const void* p) {
  return -reinterpret_cast<std::uintptr_t>(p) & (kWidth - 1);
}

template <class Type, class Op, int N>
void run(const ReduceArgs& args) {
  constexpr int unroll = 4;
  const Op op(args);
  const std::size_t bytes = args.count * Type::element;
  std::size_t at = 0;
  bool streamed = false;
  bool second_streamed = false;
  if (bytes >= 16 * kWidth) {
    // Align an output, where whole elements can: the one that is streamed, else the first.
    const bool by_second = args.second_out && args.second_store == Store::streamed;
    const std::size_t head = bytes_to_alignment(by_second ? args.second_out : args.out);
    if (head % Type::element == 0) {
      if (head != 0) tile_part<Type, Op>(args, op, 0, head);
      at = head;
    }
    // A non-temporal store needs an aligned address.
    const auto streams = [&](const void* array, Store store) {
      return array && store == Store::streamed &&
             bytes_to_alignment(static_cast<const std::byte*>(array) + at) == 0;
    };
    streamed = streams(args.out, args.store);
    second_streamed = streams(args.second_out, args.second_store);
  }
  for (; bytes - at >= unroll * kWidth; at += unroll * kWidth) {
    tile<Type, Op, N, unroll>(args, op, at, streamed, second_streamed);
  }
  for (; bytes - at >= kWidth; at += kWidth) {
    tile<Type, Op, N, 1>(args, op, at, streamed, second_streamed);
  }
  if (at < bytes) tile_part<Type, Op>(args, op, at, bytes - at);
  if (streamed || second_streamed) stream_fence();
}

// --- from run-time values to a loop
// ---------------------------------------------------------------

template <class Type, class Op>
void by_inputs(const ReduceArgs& args) {
  if constexpr (!Op::special_cases) return run<Type, Op, 0>(args);
  switch (args.n) {
    case 2:
      return run<Type, Op, 2>(args);
    case 3:
      return run<Type, Op, 3>(args);
    case 4:
      return run<Type, Op, 4>(args);
    default:
      return run<Type, Op, 0>(args);
  }
}

template <class Type>
void reduce_floating(const ReduceArgs& args) {
  switch (args.op) {
    case ReduceOp::sum:
      return by_inputs<Type, Sum>(args);
    case ReduceOp::avg:
      return by_inputs<Type, Average>(args);
    case ReduceOp::min:
      return by_inputs<Type, Min>(args);
    case ReduceOp::max:
      return by_inputs<Type, Max>(args);
    case ReduceOp::product:
      return by_inputs<Type, Product>(args);
    case ReduceOp::premul_sum:
      return by_inputs<Type, PremulSum>(args);
    default:
      __builtin_unreachable();  // reduce() has refused it
  }
}

// For what works bit by bit: one loop for all integers.
template <class T>
ReduceArgs as_bytes(ReduceArgs args) {
  args.count *= sizeof(T);
  return args;
}

// What does not depend on the sign is done on the unsigned type: it wraps without undefined
// behaviour, and both signs share the code.
template <class T, class Unsigned>
void reduce_integer(const ReduceArgs& args) {
  switch (args.op) {
    case ReduceOp::sum:
      return by_inputs<Plain<Unsigned>, Sum>(args);
    case ReduceOp::avg:
      return by_inputs<Plain<T>, Average>(args);
    case ReduceOp::min:
      return by_inputs<Plain<T>, Min>(args);
    case ReduceOp::max:
      return by_inputs<Plain<T>, Max>(args);
    case ReduceOp::product:
      return by_inputs<Plain<Unsigned>, Product>(args);
    case ReduceOp::band:
      return by_inputs<Plain<std::uint8_t>, And>(as_bytes<T>(args));
    case ReduceOp::bor:
      return by_inputs<Plain<std::uint8_t>, Or>(as_bytes<T>(args));
    case ReduceOp::bxor:
      return by_inputs<Plain<std::uint8_t>, Xor>(as_bytes<T>(args));
    default:
      __builtin_unreachable();  // reduce() has refused it
  }
}

void reduce_boolean(const ReduceArgs& args) {
  switch (args.op) {
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bor:
      return by_inputs<Boolean, Or>(args);
    case ReduceOp::product:
    case ReduceOp::min:
    case ReduceOp::band:
      return by_inputs<Boolean, And>(args);
    case ReduceOp::bxor:
      return by_inputs<Boolean, Xor>(args);
    default:
      __builtin_unreachable();  // reduce() has refused it
  }
}

void reduce_any(const ReduceArgs& args) {
  switch (args.dtype) {
    case DType::f64:
      return reduce_floating<Plain<double>>(args);
    case DType::f32:
      return reduce_floating<Plain<float>>(args);
    case DType::f16:
      return reduce_floating<Half>(args);
    case DType::bf16:
      return reduce_floating<Bfloat>(args);
    case DType::i8:
      return reduce_integer<std::int8_t, std::uint8_t>(args);
    case DType::i16:
      return reduce_integer<std::int16_t, std::uint16_t>(args);
    case DType::i32:
      return reduce_integer<std::int32_t, std::uint32_t>(args);
    case DType::i64:
      return reduce_integer<std::int64_t, std::uint64_t>(args);
    case DType::u8:
      return reduce_integer<std::uint8_t, std::uint8_t>(args);
    case DType::boolean:
      return reduce_boolean(args);
    default:
      __builtin_unreachable();  // reduce() has refused it
  }
}

// --- copy
// -----------------------------------------------------------------------------------------

void copy_streamed(void* to, const void* from, std::size_t bytes) {
  std::byte* out = static_cast<std::byte*>(to);
  const std::byte* in = static_cast<const std::byte*>(from);
  const std::size_t head = bytes_to_alignment(out);
  if (bytes < head + kWidth) {
    std::memcpy(out, in, bytes);
    return;
  }
  std::memcpy(out, in, head);
  std::size_t at = head;
  for (; bytes - at >= 4 * kWidth; at += 4 * kWidth) {
    Bytes raw[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) raw[v] = load(in + at + v * kWidth);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) store_streamed(out + at + v * kWidth, raw[v]);
  }
  for (; bytes - at >= kWidth; at += kWidth) store_streamed(out + at, load(in + at));
  std::memcpy(out + at, in + at, bytes - at);
  stream_fence();
}

}  // namespace
