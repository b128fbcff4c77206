// Checks, choice of the kernels, and the shares of the threads.
#include "torch/attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <sstream>

#include "base/error.h"
#include "shm/reduce.h"
#include "torch/attention_kernels.h"
#include "torch/attention_plan.h"

namespace pyparallel::dist {
namespace {

using attention::Kernels;
using attention::Rules;
using attention::Share;
using attention::Sizes;
using attention::Strided;
using attention::Tile;

constexpr std::int64_t kMostWidth = 256;

// `rows` of q meet a key.
const Kernels& kernels_of(at::ScalarType dtype, std::int64_t rows) {
#if defined(__x86_64__)
  const char* simd = shm::simd_name();
  if (std::strcmp(simd, "avx512") == 0) {
    // Few rows are bound by reading k and v: these become float32 on the way, and nothing is
    // packed.
    const bool pairs = dtype == at::kBFloat16 && rows > attention::kDirectRows;
    const bool bf16 = pairs && __builtin_cpu_supports("avx512bf16") != 0;
    return bf16 ? attention::kAvx512Bf16 : attention::kAvx512;
  }
  const bool avx2 = std::strcmp(simd, "avx2") == 0 && __builtin_cpu_supports("fma") != 0;
  if (avx2) return attention::kAvx2;
#endif
  return attention::kPortable;
}

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  text << "attention: ";
  (text << ... << parts);
  throw InvalidArgument(text.str());
}

void require(const at::Tensor& x, const char* name, at::IntArrayRef shape, at::ScalarType dtype,
             bool dense_rows) {
  const bool plain = x.device().is_cpu() && x.layout() == at::kStrided && !x.is_neg();
  if (!plain || x.sizes() != shape || x.scalar_type() != dtype) {
    refuse(name, " is ", x.scalar_type(), " ", x.sizes(), " on ", x.device(), "; expected ", dtype,
           " ", shape, " on cpu");
  }
  if (dense_rows && x.size(-1) > 1 && x.stride(-1) != 1) {
    refuse(name, " has strides ", x.strides(), "; expected rows whose elements are neighbours");
  }
}

// [batch, row, head, column].
Strided strided(const at::Tensor& x) {
  return {const_cast<void*>(x.const_data_ptr()), x.stride(0), x.stride(1), x.stride(2),
          x.stride(3)};
}

// [batch, head, row].
Strided per_row(const at::Tensor& x) {
  return {const_cast<void*>(x.const_data_ptr()), x.stride(0), x.stride(2), x.stride(1), 0};
}

attention::Element element_of_operand(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return attention::Element::f32;
    case at::kBFloat16:
      return attention::Element::bf16;
    case at::kHalf:
      return attention::Element::f16;
    default:
      refuse("operands are ", dtype, "; expected float32, bfloat16 or float16");
  }
}

Sizes sizes_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4) {
    refuse("q, k and v are ", q.sizes(), ", ", k.sizes(), " and ", v.sizes(),
           "; expected [batch, seq, heads, head_dim]");
  }
  const at::ScalarType dtype = q.scalar_type();
  element_of_operand(dtype);
  const std::int64_t heads = q.size(2);
  const std::int64_t kv_heads = k.size(2);
  require(q, "q", q.sizes(), dtype, false);
  require(k, "k", {q.size(0), k.size(1), kv_heads, q.size(3)}, dtype, false);
  require(v, "v", {q.size(0), k.size(1), kv_heads, v.size(3)}, dtype, false);
  if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
    refuse(heads, " query heads and ", kv_heads, " kv heads; expected a multiple");
  }
  if (q.size(3) > kMostWidth || v.size(3) > kMostWidth) {
    refuse("head_dim is ", q.size(3), " (v: ", v.size(3), "); expected at most ", kMostWidth);
  }
  return {heads, kv_heads, q.size(3), v.size(3)};
}

Rules rules_of(const AttentionMask& mask, std::int64_t batch, std::int64_t heads) {
  Rules rules{};
  rules.before = mask.before;
  rules.after = mask.after;
  rules.scale = static_cast<float>(mask.softmax_scale);
  rules.softcap = static_cast<float>(mask.softcap);
  if (mask.alibi_slopes.has_value()) {
    const at::Tensor& slopes = *mask.alibi_slopes;
    if (slopes.dim() == 2) {
      require(slopes, "alibi_slopes", {batch, heads}, at::kFloat, false);
      rules.slopes_batch = slopes.stride(0);
    } else {
      require(slopes, "alibi_slopes", {heads}, at::kFloat, false);
    }
    rules.slopes = slopes.const_data_ptr<float>();
    rules.slopes_head = slopes.stride(-1);
  }
  rules.dropped_below = static_cast<std::uint64_t>(std::llrint(std::ldexp(mask.dropout_p, 32)));
  rules.kept_scale = mask.dropout_p == 0 ? 1.0F : static_cast<float>(1 / (1 - mask.dropout_p));
  rules.seed = mask.seed;
  rules.first_head = mask.first_head;
  rules.all_heads = mask.all_heads == 0 ? heads : mask.all_heads;
  return rules;
}

struct Tiles {
  std::vector<Tile> queries, keys;
  attention::Meetings meetings;

  Tiles(const at::Tensor& q_pieces, std::int64_t q_rows, const at::Tensor& k_pieces,
        std::int64_t k_rows, std::int64_t columns, const Rules& rules)
      : queries(attention::cut(q_pieces, q_rows, attention::kTileRows, "q")),
        keys(attention::cut(k_pieces, k_rows, columns, "k")),
        meetings(attention::meetings(queries, keys, rules.before, rules.after)) {}

  attention::Plan plan() const {
    return {queries.data(), keys.data(), static_cast<std::int64_t>(keys.size()),
            meetings.first.data(), meetings.seen.data()};
  }
};

// At least `count` floats that begin a cache line, kept by this thread for its next call.
float* scratch(std::int64_t count) {
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<float, Free> kept;
  thread_local std::int64_t length = 0;
  if (count > length) {
    kept.reset();
    length = 0;
    const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(float) + 63) / 64 * 64;
    kept.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    if (kept == nullptr) throw std::bad_alloc();
    length = count;
  }
  return kept.get();
}

// Into how many parts the rows of a kv head are cut, so that every thread has as much to do.
std::int64_t parts_for(std::int64_t kv_heads) {
  const std::int64_t threads = attention_threads();
  if (at::in_parallel_region() || kv_heads >= 8 * threads) return 1;
  return threads / std::gcd(threads, kv_heads);
}

struct State {
  at::Tensor row_max, row_sum, acc;
};

State empty_like(const State& state) {
  return {at::full_like(state.row_max, -std::numeric_limits<double>::infinity()),
          at::zeros_like(state.row_sum), at::zeros_like(state.acc)};
}

// Takes `other` into `state`; a row that has seen nothing changes nothing.
void merge(const State& state, const State& other) {
  const at::Tensor highest = at::maximum(state.row_max, other.row_max);
  const at::Tensor base = at::where(highest.isneginf(), at::zeros_like(highest), highest);
  const at::Tensor mine = (state.row_max - base).exp_();
  const at::Tensor theirs = (other.row_max - base).exp_();
  state.row_sum.mul_(mine).add_(other.row_sum * theirs);
  state.acc.mul_(mine.transpose(1, 2).unsqueeze(-1));
  state.acc.add_(other.acc * theirs.transpose(1, 2).unsqueeze(-1));
  state.row_max.copy_(highest);
}

}  // namespace

void attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& q_pieces, const at::Tensor& k_pieces,
                       const AttentionMask& mask, const at::Tensor& row_max,
                       const at::Tensor& row_sum, const at::Tensor& acc) {
  RECORD_FUNCTION("pyparallel::kernels::attention_forward", c10::ArrayRef<const c10::IValue>());
  const Sizes sizes = sizes_of(q, k, v);
  const std::int64_t batch = q.size(0);
  const std::int64_t rows = q.size(1);
  require(row_max, "row_max", {batch, sizes.heads, rows}, at::kFloat, false);
  require(row_sum, "row_sum", {batch, sizes.heads, rows}, at::kFloat, false);
  require(acc, "acc", {batch, rows, sizes.heads, sizes.value_width}, at::kFloat, true);
  const Rules rules = rules_of(mask, batch, sizes.heads);
  const Tiles tiles(q_pieces, rows, k_pieces, k.size(1), attention::kForwardColumns, rules);
  const attention::Forward f{sizes,
                             rules,
                             tiles.plan(),
                             element_of_operand(q.scalar_type()),
                             strided(q),
                             strided(k),
                             strided(v),
                             per_row(row_max),
                             per_row(row_sum),
                             strided(acc)};
  const std::int64_t kv_heads = batch * sizes.kv_heads;
  if (kv_heads == 0 || tiles.meetings.seen.empty()) return;
  const Kernels& kernels = kernels_of(q.scalar_type(), rows * (sizes.heads / sizes.kv_heads));
  const std::int64_t parts = parts_for(kv_heads);
  const auto q_tiles = static_cast<std::int64_t>(tiles.queries.size());
  const std::int64_t q_parts = std::min(parts, q_tiles);
  const std::int64_t k_parts = std::min(parts / q_parts, f.plan.k_count);
  // Threads that share rows of q have states of their own, which are merged in order.
  std::vector<State> states{{row_max, row_sum, acc}};
  while (static_cast<std::int64_t>(states.size()) < k_parts)
    states.push_back(empty_like(states[0]));
  const std::int64_t shares = kv_heads * q_parts * k_parts;
  at::parallel_for(0, shares, 1, [&](std::int64_t begin, std::int64_t end) {
    float* space = scratch(kernels.forward_scratch(sizes));
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t k_part = i % k_parts;
      const std::int64_t q_part = i / k_parts % q_parts;
      const std::int64_t head = i / (k_parts * q_parts);
      const State& state = states[static_cast<std::size_t>(k_part)];
      attention::Forward mine = f;
      mine.row_max = per_row(state.row_max);
      mine.row_sum = per_row(state.row_sum);
      mine.acc = strided(state.acc);
      const Share share{
          head / sizes.kv_heads, head % sizes.kv_heads, q_part, k_part, q_parts, k_parts};
      kernels.forward(mine, share, space);
    }
  });
  for (std::size_t i = 1; i < states.size(); ++i) merge(states[0], states[i]);
}

void attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, const at::Tensor& lse, const at::Tensor& delta,
                        const at::Tensor& q_pieces, const at::Tensor& k_pieces,
                        const AttentionMask& mask, const at::Tensor& dq, const at::Tensor& dk,
                        const at::Tensor& dv) {
  RECORD_FUNCTION("pyparallel::kernels::attention_backward", c10::ArrayRef<const c10::IValue>());
  const Sizes sizes = sizes_of(q, k, v);
  const std::int64_t batch = q.size(0);
  const std::int64_t rows = q.size(1);
  require(dout, "dout", {batch, rows, sizes.heads, sizes.value_width}, q.scalar_type(), false);
  require(lse, "lse", {batch, sizes.heads, rows}, at::kFloat, false);
  require(delta, "delta", {batch, sizes.heads, rows}, at::kFloat, false);
  require(dq, "dq", q.sizes(), at::kFloat, true);
  require(dk, "dk", k.sizes(), at::kFloat, true);
  require(dv, "dv", v.sizes(), at::kFloat, true);
  const Rules rules = rules_of(mask, batch, sizes.heads);
  const Tiles tiles(q_pieces, rows, k_pieces, k.size(1), attention::kBackwardColumns, rules);
  const attention::Backward f{
      sizes,        rules,          tiles.plan(), element_of_operand(q.scalar_type()),
      strided(q),   strided(k),     strided(v),   strided(dout),
      per_row(lse), per_row(delta), strided(dq),  strided(dk),
      strided(dv)};
  const Kernels& kernels = kernels_of(q.scalar_type(), attention::kTileRows);
  const std::int64_t kv_heads = batch * sizes.kv_heads;
  const std::int64_t parts = parts_for(kv_heads);
  // In a phase no two shares have a row of q or of k in common: nothing is added to by two threads.
  for (std::int64_t phase = 0; phase < parts; ++phase) {
    at::parallel_for(0, kv_heads * parts, 1, [&](std::int64_t begin, std::int64_t end) {
      float* space = scratch(kernels.backward_scratch(sizes));
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t head = i / parts;
        const std::int64_t k_part = i % parts;
        const Share share{head / sizes.kv_heads,
                          head % sizes.kv_heads,
                          (k_part + phase) % parts,
                          k_part,
                          parts,
                          parts};
        kernels.backward(f, share, space);
      }
    });
  }
}

std::string attention_kernels(at::ScalarType dtype) {
  element_of_operand(dtype);
  return kernels_of(dtype, attention::kTileRows).name;
}

int attention_threads() {
#if defined(INTRA_OP_PARALLEL)
  return at::get_num_threads();
#else
  return 1;
#endif
}

void register_attention(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<AttentionMask>(m, "AttentionMask")
      .def(py::init([](double softmax_scale, std::int64_t before, std::int64_t after,
                       double softcap, std::optional<at::Tensor> alibi_slopes, double dropout_p,
                       std::uint64_t seed, std::int64_t first_head, std::int64_t all_heads) {
             return AttentionMask{
                 softmax_scale, before, after,      softcap,  std::move(alibi_slopes),
                 dropout_p,     seed,   first_head, all_heads};
           }),
           py::kw_only(), py::arg("softmax_scale"), py::arg("before"), py::arg("after"),
           py::arg("softcap"), py::arg("alibi_slopes"), py::arg("dropout_p"), py::arg("seed"),
           py::arg("first_head"), py::arg("all_heads"));
  m.def("attention_forward", &attention_forward, py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("q_pieces"), py::arg("k_pieces"), py::arg("mask"), py::arg("row_max"),
        py::arg("row_sum"), py::arg("acc"), py::call_guard<py::gil_scoped_release>(),
        "Continues the online softmax of q's rows over these keys, in place.");
  m.def("attention_backward", &attention_backward, py::arg("dout"), py::arg("q"), py::arg("k"),
        py::arg("v"), py::arg("lse"), py::arg("delta"), py::arg("q_pieces"), py::arg("k_pieces"),
        py::arg("mask"), py::arg("dq"), py::arg("dk"), py::arg("dv"),
        py::call_guard<py::gil_scoped_release>(),
        "Adds the gradients that pass through these keys to dq, dk and dv.");
  m.def("attention_kernels", &attention_kernels, py::arg("dtype"),
        "Which instructions multiply operands of this dtype.");
  m.def("attention_threads", &attention_threads, "How many threads a call is spread over.");
}

}  // namespace pyparallel::dist
