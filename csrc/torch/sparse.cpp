#include "torch/sparse.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <array>
#include <vector>

#include "base/error.h"
#include "torch/tensors.h"

namespace pyparallel::dist {
namespace {

constexpr std::size_t most_dims = 12;
// Number of entries, sparse and dense dimensions, sizes: what must agree, but for the first.
using Shape = std::array<std::int64_t, 3 + most_dims>;

Shape shape_of(const at::Tensor& coalesced) {
  Shape shape{};
  shape[0] = coalesced._nnz();
  shape[1] = coalesced.sparse_dim();
  shape[2] = coalesced.dense_dim();
  std::copy(coalesced.sizes().begin(), coalesced.sizes().end(), shape.begin() + 3);
  return shape;
}

std::vector<Shape> gather_shapes(const Shape& mine, shm::Communicator& communicator,
                                 Deadline deadline) {
  std::vector<Shape> shapes(static_cast<std::size_t>(communicator.size()));
  std::vector<shm::Block> blocks;
  for (Shape& shape : shapes) blocks.push_back({shape.data(), shape.size()});
  communicator.all_gather(mine.data(), blocks.data(), DType::i64, deadline);
  for (std::size_t rank = 0; rank < shapes.size(); ++rank) {
    if (std::equal(mine.begin() + 1, mine.end(), shapes[rank].begin() + 1)) continue;
    throw Mismatch(pyparallel::str(
        "all_reduce of a sparse tensor, group ", communicator.name(), ": rank ",
        communicator.rank(), " has ", mine[1], " sparse and ", mine[2],
        " dense dimensions of sizes ",
        at::IntArrayRef(mine.data() + 3, static_cast<std::size_t>(mine[1] + mine[2])), ", rank ",
        rank, " another shape"));
  }
  return shapes;
}

// Each rank's part, all of which have `columns` elements per entry.
std::vector<at::Tensor> gather_parts(const at::Tensor& mine, const std::vector<Shape>& shapes,
                                     std::int64_t columns, shm::Communicator& communicator,
                                     Deadline deadline) {
  std::vector<at::Tensor> parts;
  for (const Shape& shape : shapes) parts.push_back(at::empty({shape[0], columns}, mine.options()));
  const Element element = element_of(mine.scalar_type());
  DenseList to(parts, Dense::Use::write, element);
  communicator.all_gather(mine.data_ptr(), to.blocks(), element.dtype, deadline);
  return parts;
}

// One number per entry that orders entries as coalescing does.
at::Tensor keys_of(const at::Tensor& indices, at::IntArrayRef sizes) {
  at::Tensor keys = at::zeros({indices.size(0)}, indices.options());
  for (std::int64_t dim = 0; dim < indices.size(1); ++dim) {
    keys = keys * sizes[static_cast<std::size_t>(dim)] + indices.select(1, dim);
  }
  return keys;
}

}  // namespace

void require_sparse_sum(const at::Tensor& tensor, ReduceOp op) {
  PYPARALLEL_REQUIRE(tensor.is_sparse() && tensor.device().is_cpu(), "a ", tensor.layout(),
                     " tensor on ", tensor.device().str(), "; expected sparse COO on cpu");
  PYPARALLEL_REQUIRE(op == ReduceOp::sum || op == ReduceOp::avg, "reduction ", name_of(op),
                     " of sparse tensors; entries that are not stored count as zero only in sum ",
                     "and avg");
  PYPARALLEL_REQUIRE(op == ReduceOp::sum || tensor.is_floating_point() || tensor.is_complex(),
                     "avg of a sparse ", c10::toString(tensor.scalar_type()),
                     " tensor; only floating point can be averaged");
  PYPARALLEL_REQUIRE(tensor.scalar_type() != at::kBool, "a sum of sparse bool tensors; use uint8");
  PYPARALLEL_REQUIRE(tensor.dim() <= static_cast<std::int64_t>(most_dims), "a sparse tensor of ",
                     tensor.dim(), " dimensions; at most ", most_dims);
}

void sparse_all_reduce(const at::Tensor& tensor, ReduceOp op, shm::Communicator& communicator,
                       Deadline deadline) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor mine = tensor.coalesce();
  const std::vector<Shape> shapes = gather_shapes(shape_of(mine), communicator, deadline);

  const at::Tensor values = mine.values().contiguous();
  std::int64_t width = 1;
  for (const auto size : values.sizes().slice(1)) width *= size;
  const at::Tensor indices = mine.indices().t().contiguous();
  const auto all_indices = gather_parts(indices, shapes, mine.sparse_dim(), communicator, deadline);
  const auto all_values = gather_parts(values, shapes, width, communicator, deadline);

  const at::Tensor joined = at::cat(all_indices);
  const auto [keys, position] = at::_unique(keys_of(joined, tensor.sizes()), true, true);
  const bool wide = values.scalar_type() == at::kHalf || values.scalar_type() == at::kBFloat16;
  const auto type = wide ? at::kFloat : values.scalar_type();
  at::Tensor sum = at::zeros({keys.size(0), width}, values.options().dtype(type));
  at::Tensor entries = at::empty({keys.size(0), mine.sparse_dim()}, indices.options());
  entries.index_copy_(0, position, joined);
  std::int64_t offset = 0;
  for (std::size_t rank = 0; rank < shapes.size(); ++rank) {  // a rank has no entry twice
    sum.index_add_(0, position.narrow(0, offset, shapes[rank][0]), all_values[rank].to(type));
    offset += shapes[rank][0];
  }
  if (op == ReduceOp::avg) sum.div_(static_cast<double>(communicator.size()));

  std::vector<std::int64_t> value_sizes{keys.size(0)};
  for (const auto size : values.sizes().slice(1)) value_sizes.push_back(size);
  const at::Tensor result = at::_sparse_coo_tensor_unsafe(
      entries.t().contiguous(), sum.to(values.scalar_type()).view(value_sizes), tensor.sizes());
  tensor.copy_(result._coalesced_(true));
}

}  // namespace pyparallel::dist
