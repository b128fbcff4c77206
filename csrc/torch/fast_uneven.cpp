// The fast calls (fast_calls.h) with uneven shards: a list says how many rows each rank has.
#include <torch/csrc/utils/pybind.h>

#include "torch/fast_calls.h"
#include "torch/plain_tensors.h"

namespace pyparallel::dist {
namespace {

// Uneven shards: how many rows each rank has. False unless a list of one size per rank.
class Sizes {
 public:
  Sizes(PyObject* list, int ranks) {
    if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != ranks) return;
    for (int r = 0; r < ranks; ++r) {
      PyObject* size = PyList_GET_ITEM(list, r);
      if (!PyLong_CheckExact(size)) return;
      int overflow = 0;
      const long long rows = PyLong_AsLongLongAndOverflow(size, &overflow);
      constexpr long long most = 1LL << 40;  // so that no sum or product overflows
      if (overflow != 0 || rows < 0 || rows > most) return;
      rows_.push_back(rows);
      sum_ += rows;
    }
    valid_ = true;
  }
  explicit operator bool() const { return valid_; }
  std::int64_t sum() const { return sum_; }
  std::int64_t operator[](int rank) const { return rows_[rank]; }

  // `whole` has these rows together, `shard` those of `rank`, and rows are alike. Not for tensors
  // without elements, whose rows have no size.
  bool divide(const Plain& whole, const Plain& shard, int rank) const {
    return counts_rows_of(whole) && shard.tensor().dim() == whole.tensor().dim() &&
           shard.dtype() == whole.dtype() && shard.tensor().size(0) == rows_[rank] &&
           shard.tensor().sizes().slice(1).equals(whole.tensor().sizes().slice(1));
  }
  bool counts_rows_of(const Plain& whole) const {
    return whole.count() > 0 && whole.tensor().dim() > 0 && whole.tensor().size(0) == sum_;
  }
  template <typename AnyBlock>
  c10::SmallVector<AnyBlock, 16> blocks(const Plain& whole) const {
    const std::size_t row = whole.count() / static_cast<std::size_t>(sum_);
    std::byte* data = whole.data();
    c10::SmallVector<AnyBlock, 16> found;
    for (const std::int64_t rows : rows_) {
      found.push_back({data, static_cast<std::size_t>(rows) * row});
      data += found.back().count * size_of(whole.dtype());
    }
    return found;
  }

 private:
  bool valid_ = false;
  std::int64_t sum_ = 0;
  c10::SmallVector<std::int64_t, 16> rows_;
};

PyObject* all_gather_uneven(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain x(args[0]);
  const Sizes sizes(args[2], seat.size());
  if (!x || x.tensor().dim() == 0 || !sizes) return nullptr;
  const Out result(args[1], x, with_first(x.tensor(), sizes.sum()));
  const Plain out(result.object());
  if (!out || !sizes.divide(out, x, seat.rank()) || !out.disjoint(x)) return nullptr;
  const auto blocks = sizes.blocks<Block>(out);
  {
    const WithoutGil without_gil;
    seat.all_gather(x.data(), blocks.data(), x.dtype(), deadline);
  }
  out.written();
  return given_back(result.object());
}

PyObject* reduce_scatter_uneven(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain x(args[0]);
  const Sizes sizes(args[3], seat.size());
  if (!x || x.tensor().dim() == 0 || !sizes) return nullptr;
  const auto reduction = reduction_of(args[1], x.dtype());
  if (!reduction) return nullptr;
  const Out result(args[2], x, with_first(x.tensor(), sizes[seat.rank()]));
  const Plain out(result.object());
  if (!out || !sizes.divide(x, out, seat.rank()) || !out.disjoint(x)) return nullptr;
  const auto blocks = sizes.blocks<ConstBlock>(x);
  {
    const WithoutGil without_gil;
    seat.reduce_scatter(blocks.data(), out.data(), x.dtype(), *reduction, deadline);
  }
  out.written();
  return given_back(result.object());
}

PyObject* all_to_all_uneven(shm::Communicator& seat, PyObject* const* args, Deadline deadline) {
  const Plain x(args[0]);
  const Sizes sent(args[2], seat.size());
  const Sizes received(args[3], seat.size());
  if (!x || !sent || !received || !sent.counts_rows_of(x)) return nullptr;
  if (sent[seat.rank()] != received[seat.rank()]) return nullptr;
  const Out result(args[1], x, with_first(x.tensor(), received.sum()));
  const Plain out(result.object());
  if (!out || !received.counts_rows_of(out) || out.dtype() != x.dtype() || !out.disjoint(x) ||
      !out.tensor().sizes().slice(1).equals(x.tensor().sizes().slice(1)))
    return nullptr;
  const auto from = sent.blocks<ConstBlock>(x);
  const auto to = received.blocks<Block>(out);
  {
    const WithoutGil without_gil;
    seat.all_to_all(from.data(), to.data(), x.dtype(), deadline);
  }
  out.written();
  return given_back(result.object());
}

}  // namespace

void add_uneven_calls(pybind11::handle cls) {
  static PyMethodDef methods[] = {
      fast_call<all_gather_uneven, 3>("all_gather_uneven", "x, out or None, sizes"),
      fast_call<reduce_scatter_uneven, 4>("reduce_scatter_uneven", "x, op, out or None, sizes"),
      fast_call<all_to_all_uneven, 4>("all_to_all_uneven", "x, out or None, in_sizes, out_sizes"),
  };
  python::add_fast_methods(cls, methods);
}

}  // namespace pyparallel::dist
