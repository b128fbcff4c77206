// The only place of csrc/cuda where memory order and scope are spelled out. Two bodies: PTX for the
// device, compiler atomics for the host emulation (so that ThreadSanitizer sees what a GPU would).
//
// Scopes: "system" is between ranks (other GPUs, the host), "device" is within one launch. Anything
// that a peer may look at goes through a _system function.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/device.h"

namespace pyparallel::cuda::order {

// What one multimem access moves.
struct Bits128 {
  std::uint32_t word[4];
};

#if defined(__CUDACC__)

// clang-format off
#define PYPARALLEL_ORDER_LOAD(name, type, ptx, constraint)                                      \
  PYPARALLEL_DEVICE type name(const type* p) {                                                  \
    type v;                                                                                     \
    asm volatile(ptx " %0, [%1];" : constraint(v) : "l"(p) : "memory");                         \
    return v;                                                                                   \
  }
#define PYPARALLEL_ORDER_STORE(name, type, ptx, constraint)                                     \
  PYPARALLEL_DEVICE void name(type* p, type v) {                                                \
    asm volatile(ptx " [%0], %1;" ::"l"(p), constraint(v) : "memory");                          \
  }
#define PYPARALLEL_ORDER_ADD(name, type, ptx, out, in)                                          \
  PYPARALLEL_DEVICE type name(type* p, type v) {                                                \
    type old;                                                                                   \
    asm volatile(ptx " %0, [%1], %2;" : out(old) : "l"(p), in(v) : "memory");                   \
    return old;                                                                                 \
  }

PYPARALLEL_ORDER_LOAD(load_acquire_system, std::uint32_t, "ld.acquire.sys.u32", "=r")
PYPARALLEL_ORDER_LOAD(load_acquire_system, std::uint64_t, "ld.acquire.sys.u64", "=l")
PYPARALLEL_ORDER_LOAD(load_relaxed_system, std::uint32_t, "ld.relaxed.sys.u32", "=r")
PYPARALLEL_ORDER_LOAD(load_relaxed_device, std::uint32_t, "ld.relaxed.gpu.u32", "=r")
PYPARALLEL_ORDER_STORE(store_release_system, std::uint32_t, "st.release.sys.u32", "r")
PYPARALLEL_ORDER_STORE(store_release_system, std::uint64_t, "st.release.sys.u64", "l")
PYPARALLEL_ORDER_STORE(store_relaxed_device, std::uint32_t, "st.relaxed.gpu.u32", "r")
PYPARALLEL_ORDER_ADD(add_release_system, std::uint32_t, "atom.release.sys.add.u32", "=r", "r")
PYPARALLEL_ORDER_ADD(add_release_system, std::uint64_t, "atom.release.sys.add.u64", "=l", "l")
PYPARALLEL_ORDER_ADD(add_both_device, std::uint32_t, "atom.acq_rel.gpu.add.u32", "=r", "r")
// clang-format on
#undef PYPARALLEL_ORDER_LOAD
#undef PYPARALLEL_ORDER_STORE
#undef PYPARALLEL_ORDER_ADD

// True for the one caller that changes *p from 0 to 1.
PYPARALLEL_DEVICE bool claim_device(std::uint32_t* p) {
  std::uint32_t old;
  asm volatile("atom.relaxed.gpu.cas.b32 %0, [%1], 0, 1;" : "=r"(old) : "l"(p) : "memory");
  return old == 0;
}

// A multicast address and the ordinary addresses behind it are aliases: accesses through the one
// are ordered with accesses through the other only by this fence, on top of the flags. Before a
// block's barrier it covers what its own thread did, after the barrier what its own thread does
// next.
PYPARALLEL_DEVICE void fence_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// multimem_*: the sum over all ranks' memories (accumulated in fp32; the switch chooses the order),
// and a store to all of them. sm_90 and later.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define PYPARALLEL_MULTIMEM_SUM(name, type)                                                  \
  PYPARALLEL_DEVICE Bits128 name(const Multicast& m, std::size_t offset) {                   \
    Bits128 v;                                                                               \
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add" type " {%0, %1, %2, %3}, [%4];" \
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])        \
                 : "l"(__cvta_generic_to_global(m.base + offset))                            \
                 : "memory");                                                                \
    return v;                                                                                \
  }
PYPARALLEL_MULTIMEM_SUM(multimem_sum_f16, ".acc::f32.v4.f16x2")
PYPARALLEL_MULTIMEM_SUM(multimem_sum_bf16, ".acc::f32.v4.bf16x2")
#undef PYPARALLEL_MULTIMEM_SUM

PYPARALLEL_DEVICE Bits128 multimem_sum_f32(const Multicast& m, std::size_t offset) {
  float v[4];
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "l"(__cvta_generic_to_global(m.base + offset))
               : "memory");
  return {
      {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])}};
}

PYPARALLEL_DEVICE void multimem_store(const Multicast& m, std::size_t offset, Bits128 v) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                   __cvta_generic_to_global(m.base + offset)),
               "f"(__uint_as_float(v.word[0])), "f"(__uint_as_float(v.word[1])),
               "f"(__uint_as_float(v.word[2])), "f"(__uint_as_float(v.word[3]))
               : "memory");
}
#endif

#else  // the host emulation

// The negative controls of the tests weaken one order at a time and expect ThreadSanitizer to
// object.
#if !defined(PYPARALLEL_ORDER_RELEASE)
#define PYPARALLEL_ORDER_RELEASE __ATOMIC_RELEASE
#endif
#if !defined(PYPARALLEL_ORDER_ACQUIRE)
#define PYPARALLEL_ORDER_ACQUIRE __ATOMIC_ACQUIRE
#endif

template <typename T>
T load_acquire_system(const T* p) {
  return __atomic_load_n(p, PYPARALLEL_ORDER_ACQUIRE);
}
template <typename T>
T load_relaxed_system(const T* p) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
template <typename T>
void store_release_system(T* p, T v) {
  __atomic_store_n(p, v, PYPARALLEL_ORDER_RELEASE);
}
template <typename T>
T add_release_system(T* p, T v) {
  return __atomic_fetch_add(p, v, PYPARALLEL_ORDER_RELEASE);
}
inline std::uint32_t load_relaxed_device(const std::uint32_t* p) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void store_relaxed_device(std::uint32_t* p, std::uint32_t v) {
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline std::uint32_t add_both_device(std::uint32_t* p, std::uint32_t v) {
  return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}
inline bool claim_device(std::uint32_t* p) {
  std::uint32_t zero = 0;
  return __atomic_compare_exchange_n(p, &zero, 1u, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
inline void fence_alias() {}
// The sums are in the emulation: they need arithmetic.
inline void multimem_store(const Multicast& m, std::size_t offset, Bits128 v) {
  for (std::uint32_t r = 0; r < m.world; ++r) {
    std::memcpy(static_cast<char*>(m.peers[r]) + offset, &v, sizeof v);
  }
}

#endif

}  // namespace pyparallel::cuda::order
