// The steps of pyparallel/attention on the CPU: flash attention over tiles that know positions.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>

namespace pyparallel::dist {

// The fields of pyparallel.attention.Mask; `before` and `after` are how far a query sees, at most
// 2^40.
struct AttentionMask {
  double softmax_scale;
  std::int64_t before, after;
  double softcap;
  std::optional<at::Tensor> alibi_slopes;  // float32 [heads] or [batch, heads]
  double dropout_p;
  std::uint64_t seed;
  std::int64_t first_head, all_heads;
};

// Continues the softmax of q's rows over these keys. q [batch, seq_q, heads, d], k [batch, seq_k,
// kv_heads, d], v [batch, seq_k, kv_heads, d_v], alike float32, bfloat16 or float16, of any
// strides; d and d_v at most 256. Pieces are int64 [n, 5]. row_max and row_sum [batch, heads,
// seq_q] and acc [batch, seq_q, heads, d_v] are float32, the rows of acc dense. Throws
// InvalidArgument.
void attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& q_pieces, const at::Tensor& k_pieces,
                       const AttentionMask& mask, const at::Tensor& row_max,
                       const at::Tensor& row_sum, const at::Tensor& acc);

// Adds to dq, dk and dv, float32 with dense rows. lse and delta are float32 [batch, heads, seq_q].
// The same bits on each call with as many threads.
void attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, const at::Tensor& lse, const at::Tensor& delta,
                        const at::Tensor& q_pieces, const at::Tensor& k_pieces,
                        const AttentionMask& mask, const at::Tensor& dq, const at::Tensor& dk,
                        const at::Tensor& dv);

// Which instructions multiply operands of this type.
std::string attention_kernels(at::ScalarType dtype);

// How many threads a call is spread over.
int attention_threads();

void register_attention(pybind11::module_& m);

}  // namespace pyparallel::dist
