// How a collective of the backend starts: included by the files that define collectives.
#pragma once

#include "base/error.h"
#include "torch/backend.h"

namespace pyparallel::dist {

// Whether torch says that the caller waits for the call's end; older versions do not say.
template <typename Opts>
bool caller_waits(const Opts& opts) {
  if constexpr (requires { opts.asyncOp; }) {
    return !opts.asyncOp;
  } else {
    return false;
  }
}

template <typename Opts, typename GetOutputs, typename Prepare>
Backend::Work Backend::start(const Spec& spec, const Opts& opts, const Tensors& inputs,
                             GetOutputs&& outputs, Prepare&& prepare) {
  auto call = [&]() -> decltype(prepare()) {
    try {
      return prepare();
    } catch (const InvalidArgument& error) {
      refuse(spec.name, error);
    }
  }();
  const std::chrono::milliseconds timeout = timeout_of(opts.timeout);
  if (!caller_waits(opts) || batch_->is_open()) {
    return enqueue(spec, timeout, inputs, outputs(), Call(std::move(call)));
  }
  call(*communicator_, Deadline::after(timeout));
  return {};
}

inline const at::Tensor& the_only(const std::vector<at::Tensor>& tensors, const char* what) {
  PYPARALLEL_REQUIRE(tensors.size() == 1, what, " has ", tensors.size(),
                     " tensors; expected one (a rank has one device here)");
  return tensors.front();
}

inline const std::vector<at::Tensor>& the_only(const std::vector<std::vector<at::Tensor>>& lists,
                                               const char* what) {
  PYPARALLEL_REQUIRE(lists.size() == 1, what, " has ", lists.size(),
                     " lists of tensors; expected one");
  return lists.front();
}

inline void require_root(std::int64_t root, int size) {
  PYPARALLEL_REQUIRE(root >= 0 && root < size, "root is rank ", root, "; expected 0 to ", size - 1);
}

// As many tensors as ranks, each like `like`.
inline void require_one_per_rank(const std::vector<at::Tensor>& tensors, const at::Tensor& like,
                                 int size, const char* what) {
  PYPARALLEL_REQUIRE(tensors.size() == static_cast<std::size_t>(size), what, " has ",
                     tensors.size(), " tensors; expected one per rank: ", size);
  for (const at::Tensor& tensor : tensors) {
    require_dense_cpu(tensor, what);
    require_same_type(tensor, like, what);
  }
}

// Equal blocks of a dense tensor, one per rank.
template <typename Block>
c10::SmallVector<Block, 8> equal_blocks(const Dense& dense, Element element, int size) {
  const std::size_t count = dense.count() / static_cast<std::size_t>(size);
  auto* const base = static_cast<std::byte*>(dense.data());
  c10::SmallVector<Block, 8> blocks;
  for (int rank = 0; rank < size; ++rank) {
    blocks.push_back(
        {base + static_cast<std::size_t>(rank) * count * size_of(element.dtype), count});
  }
  return blocks;
}

// Elements for each rank along the first dimension.
inline std::vector<std::size_t> counts_of(const at::Tensor& tensor,
                                          const std::vector<std::int64_t>& splits, int size,
                                          const char* what) {
  const std::int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
  const std::int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  if (splits.empty()) {
    PYPARALLEL_REQUIRE(rows % size == 0, what, " has ", rows, " rows, which ", size,
                       " ranks cannot share equally; pass split sizes");
    return std::vector<std::size_t>(static_cast<std::size_t>(size),
                                    static_cast<std::size_t>(rows / size * row));
  }
  PYPARALLEL_REQUIRE(splits.size() == static_cast<std::size_t>(size), what, " has ", splits.size(),
                     " split sizes; expected one per rank: ", size);
  std::vector<std::size_t> counts;
  std::int64_t sum = 0;
  for (const std::int64_t split : splits) {
    PYPARALLEL_REQUIRE(split >= 0 && split <= rows, what, " has a split size of ", split,
                       "; expected 0 to its ", rows, " rows");
    sum += split;
    counts.push_back(static_cast<std::size_t>(split * row));
  }
  PYPARALLEL_REQUIRE(sum == rows, what, " has ", rows, " rows, its split sizes sum to ", sum);
  return counts;
}

template <typename Block>
std::vector<Block> cut(const Dense& dense, const std::vector<std::size_t>& counts,
                       Element element) {
  auto* next = static_cast<std::byte*>(dense.data());
  std::vector<Block> blocks;
  for (const std::size_t count : counts) {
    blocks.push_back({next, count * element.parts});
    next += count * element.parts * size_of(element.dtype);
  }
  return blocks;
}

}  // namespace pyparallel::dist
