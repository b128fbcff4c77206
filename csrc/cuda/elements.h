// How elements are moved, summed and rounded. Between ranks everything goes in packs of 16 bytes;
// only the user's arrays may begin anywhere and end in the middle of a pack.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda/device.h"
#include "cuda/memory_order.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace pyparallel::cuda {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

PYPARALLEL_DEVICE float to_float(float x) { return x; }
PYPARALLEL_DEVICE void from_float(float x, float* out) { *out = x; }

#if defined(__CUDACC__)
PYPARALLEL_DEVICE float to_float(Half x) { return __half2float(__ushort_as_half(x.bits)); }
PYPARALLEL_DEVICE float to_float(BFloat16 x) {
  return __bfloat162float(__ushort_as_bfloat16(x.bits));
}
// To nearest, ties to even.
PYPARALLEL_DEVICE void from_float(float x, Half* out) {
  out->bits = __half_as_ushort(__float2half_rn(x));
}
PYPARALLEL_DEVICE void from_float(float x, BFloat16* out) {
  out->bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
PYPARALLEL_DEVICE order::Bits128 multimem_sum(const Multicast& m, std::size_t offset, float) {
  return order::multimem_sum_f32(m, offset);
}
PYPARALLEL_DEVICE order::Bits128 multimem_sum(const Multicast& m, std::size_t offset, Half) {
  return order::multimem_sum_f16(m, offset);
}
PYPARALLEL_DEVICE order::Bits128 multimem_sum(const Multicast& m, std::size_t offset, BFloat16) {
  return order::multimem_sum_bf16(m, offset);
}
#endif
#endif

// 16 bytes of elements, the first in the low bits. Words, not elements: what is only moved then
// stays in four registers, and the next load need not wait for this one to be taken apart.
template <typename T>
struct alignas(16) Pack {
  static constexpr int size = 16 / sizeof(T);
  static constexpr int per_word = 4 / sizeof(T);
  std::uint32_t word[4];

  PYPARALLEL_DEVICE T get(int k) const {
    const std::uint32_t bits = word[k / per_word] >> (k % per_word * 8 * sizeof(T));
    T x;
    memcpy(&x, &bits, sizeof x);
    return x;
  }
  // Of a pack whose element k is zero.
  PYPARALLEL_DEVICE void set(int k, T x) {
    std::uint32_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    word[k / per_word] |= bits << (k % per_word * 8 * sizeof(T));
  }
};

template <typename T>
PYPARALLEL_HOST_DEVICE std::size_t packs_in(std::size_t count) {
  return (count + Pack<T>::size - 1) / Pack<T>::size;
}

// A user's array, seen as packs: the last one may be partial, and any address that suits T will do.
template <typename T>
struct Array {
  T* data;
  std::size_t count;

  PYPARALLEL_DEVICE bool whole(std::size_t pack) const {
    return (pack + 1) * Pack<T>::size <= count;
  }
  PYPARALLEL_DEVICE bool aligned() const {
    return reinterpret_cast<std::uintptr_t>(data) % sizeof(Pack<T>) == 0;
  }
};

// Pack number `i` of the array; zeros beyond its end.
template <typename T>
PYPARALLEL_DEVICE Pack<T> load_pack(Array<const T> a, std::size_t i) {
  const T* from = a.data + i * Pack<T>::size;
  if (a.aligned() && a.whole(i)) return *reinterpret_cast<const Pack<T>*>(from);
  Pack<T> p{};
#pragma unroll
  for (int k = 0; k < Pack<T>::size; ++k) {
    if (i * Pack<T>::size + k < a.count) p.set(k, from[k]);
  }
  return p;
}

template <typename T>
PYPARALLEL_DEVICE void store_pack(Array<T> a, std::size_t i, const Pack<T>& p) {
  T* to = a.data + i * Pack<T>::size;
  if (a.aligned() && a.whole(i)) {
    *reinterpret_cast<Pack<T>*>(to) = p;
    return;
  }
#pragma unroll
  for (int k = 0; k < Pack<T>::size; ++k) {
    if (i * Pack<T>::size + k < a.count) to[k] = p.get(k);
  }
}

// Pack number `i` of each of `world` slots, added in rank order in fp32 and rounded once.
template <typename T>
PYPARALLEL_DEVICE Pack<T> sum_slots(const char* slots, std::size_t slot_bytes, unsigned world,
                                    std::size_t i) {
  const char* from = slots + i * sizeof(Pack<T>);
  Pack<T> p = *reinterpret_cast<const Pack<T>*>(from);
  float sum[Pack<T>::size];
#pragma unroll
  for (int k = 0; k < Pack<T>::size; ++k) sum[k] = to_float(p.get(k));
#pragma unroll 4
  for (unsigned r = 1; r < world; ++r) {
    p = *reinterpret_cast<const Pack<T>*>(from + r * slot_bytes);
#pragma unroll
    for (int k = 0; k < Pack<T>::size; ++k) sum[k] += to_float(p.get(k));
  }
  p = Pack<T>{};
#pragma unroll
  for (int k = 0; k < Pack<T>::size; ++k) {
    T rounded;
    from_float(sum[k], &rounded);
    p.set(k, rounded);
  }
  return p;
}

}  // namespace pyparallel::cuda
