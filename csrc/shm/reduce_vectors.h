// Vectors of PYPARALLEL_VECTOR_BYTES bytes, for the reduce_<set>.cpp files: see reduce_template.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifndef PYPARALLEL_VECTOR_BYTES
#error "included by reduce_<set>.cpp only, which says how wide its vectors are"
#endif

namespace {

constexpr std::size_t kWidth = PYPARALLEL_VECTOR_BYTES;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(PYPARALLEL_VECTOR_BYTES)));
};
using Bytes = VectorOf<std::uint8_t>::type;
using Words = VectorOf<std::uint32_t>::type;
using Floats = VectorOf<float>::type;

// What a vector consists of.
template <class V>
struct Lane {
  using type = std::remove_reference_t<decltype(std::declval<V&>()[0])>;
  static constexpr bool floating = std::is_floating_point<type>::value;
};

template <class V>
inline V splat(typename Lane<V>::type x) {
  return x - V{};  // not V{} + x: that turns -0.0 into 0.0
}

inline Bytes load(const std::byte* from) {
  Bytes raw;
  std::memcpy(&raw, from, sizeof(raw));
  return raw;
}

inline void store(std::byte* to, Bytes raw) { std::memcpy(to, &raw, sizeof(raw)); }

// The first `bytes` bytes; the rest of the vector is zero and its results are dropped, so that the
// ends of an array go through the same arithmetic as its middle.
inline Bytes load_part(const std::byte* from, std::size_t bytes) {
  Bytes raw = {};
  std::memcpy(&raw, from, bytes);
  return raw;
}

inline void store_part(std::byte* to, Bytes raw, std::size_t bytes) {
  std::memcpy(to, &raw, bytes);
}

}  // namespace
