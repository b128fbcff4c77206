// What few_rows.cpp calls once it has seen that the CPU can.
#pragma once

#include <cstdint>

namespace pyparallel::dist {

// y [m, n] = x [m, k] @ w [n, k]^T; rows are contiguous, m >= 1.
struct FewRows {
  std::int64_t m, n, k;
};

#if defined(__x86_64__)
// AVX-512 F and BW.
void product_f32(const float* x, const float* w, float* y, const FewRows& s);
// And its bfloat16 dot products; elements are bfloat16.
void product_bf16(const std::uint16_t* x, const std::uint16_t* w, std::uint16_t* y,
                  const FewRows& s);
#endif

}  // namespace pyparallel::dist
