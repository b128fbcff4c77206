// Random arrays at any alignment with guards around them, and what the collectives should make of
// them: in float64 for the bound, and in rank order in fp32, rounded once, for the bits.
#pragma once

#include <cfloat>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "check.h"
#include "emulated_elements.h"

namespace pyparallel::cuda::emulation {

template <typename T>
constexpr DType dtype_of() {
  return std::is_same_v<T, float> ? DType::f32 : std::is_same_v<T, Half> ? DType::f16 : DType::bf16;
}
// Half of the distance between neighbours, relative.
template <typename T>
constexpr double rounding() {
  return std::is_same_v<T, float> ? FLT_EPSILON / 2 : std::is_same_v<T, Half> ? 0x1p-11 : 0x1p-8;
}

template <typename T>
class Guarded {
 public:
  Guarded(std::size_t count, int misaligned, std::minstd_rand& random)
      : count_(count), start_(16 + misaligned), bytes_((count + start_ + 16) * sizeof(T) + 16) {
    for (auto& byte : bytes_) byte = static_cast<unsigned char>(random() >> 7);
    before_ = bytes_;
  }
  T* data() { return base() + start_; }
  std::size_t count() const { return count_; }
  void fill_normal(std::minstd_rand& random) {
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < count_; ++i) from_float(normal(random), data() + i);
    before_ = bytes_;
  }
  std::vector<T> values() { return {data(), data() + count_}; }
  // Nothing outside the array was touched.
  void check_guards() {
    const auto* inside = reinterpret_cast<const unsigned char*>(data());
    const auto* inside_end = reinterpret_cast<const unsigned char*>(data() + count_);
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      const unsigned char* p = bytes_.data() + i;
      if (p < inside || p >= inside_end) {
        CHECK(*p == before_[i], "byte ", p - inside, " of an array of ", inside_end - inside);
      }
    }
  }

 private:
  // The first multiple of 16.
  T* base() {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    return reinterpret_cast<T*>((address + 15) / 16 * 16);
  }
  std::size_t count_, start_;
  std::vector<unsigned char> bytes_, before_;
};

// The sum of inputs[r][i] over r.
template <typename T>
struct Sum {
  T rounded{};  // in rank order
  double exact = 0;
  double bound = 0;  // of any order, fp32 accumulation and one rounding
};
template <typename T>
Sum<T> sum_over_ranks(const std::vector<std::vector<T>>& inputs, std::size_t i) {
  Sum<T> s;
  float rank_order = to_float(inputs[0][i]);
  double sizes = 0;
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    if (r > 0) rank_order += to_float(inputs[r][i]);
    s.exact += to_float(inputs[r][i]);
    sizes += std::fabs(to_float(inputs[r][i]));
  }
  from_float(rank_order, &s.rounded);
  const double accumulated = (inputs.size() - 1) * (FLT_EPSILON / 2) * sizes;
  s.bound = accumulated + rounding<T>() * (std::fabs(s.exact) + accumulated) + 0x1p-25;
  return s;
}

template <typename T>
bool same_bits(T a, T b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

}  // namespace pyparallel::cuda::emulation
