// One random collective, checked bit for bit on every rank. All ranks draw the same call.
#pragma once

#include <algorithm>

#include "ranks.h"

namespace ranks {

struct Draw {
  std::uint64_t seed;
  std::uint64_t call;   // number of the call, alike on all ranks
  std::size_t largest;  // bytes of an array
};

class OneCall {
 public:
  OneCall(Communicator& comm, const Draw& draw)
      : comm_(comm), n_(comm.size()), me_(comm.rank()), draw_(draw), common_(draw.seed, draw.call) {
    dtype_ = static_cast<DType>(common_.below(static_cast<std::size_t>(DType::count_)));
    do {
      reduction_.op =
          static_cast<ReduceOp>(common_.below(static_cast<std::size_t>(ReduceOp::count_)));
    } while (!is_defined(reduction_.op, dtype_));
    reduction_.factor = factor_of(me_);
    root_ = static_cast<int>(common_.below(static_cast<std::size_t>(n_)));
  }

  void make() {
    switch (common_.below(10)) {
      case 0:
      case 1:
        return all_reduce();
      case 2:
        return reduce();
      case 3:
        return reduce_scatter();
      case 4:
        return all_gather();
      case 5:
        return all_to_all();
      case 6:
        return broadcast();
      case 7:
        return scatter();
      case 8:
        return gather();
      default:
        return comm_.barrier(soon());
    }
  }

 private:
  using Bytes = std::vector<std::byte>;
  static double factor_of(int rank) { return 0.5 + 0.25 * rank; }

  // A size class first, so that each path (inbox, one shot, chunks) has its share.
  std::size_t size() {
    const std::size_t most = draw_.largest / size_of(dtype_);
    const std::size_t kind = common_.below(8);
    if (kind == 0) return 0;
    if (kind < 4) return common_.below(std::min<std::size_t>(300, most));
    if (kind < 6) return common_.below(most / 8 + 1);
    return common_.below(most + 1);
  }
  Bytes input_of(int rank, std::size_t count, int to = 0) const {
    return data(Numbers(draw_.seed + static_cast<std::uint64_t>(to), draw_.call,
                        static_cast<std::uint64_t>(rank) + 1),
                dtype_, count);
  }
  Bytes poisoned(std::size_t count) const {
    return Bytes(count * size_of(dtype_), std::byte{0xa5});
  }
  std::vector<std::size_t> sizes() {
    std::vector<std::size_t> counts(static_cast<std::size_t>(n_));
    const bool even = common_.one_in(2);
    for (auto& count : counts) count = size() / static_cast<std::size_t>(n_);
    if (even) std::fill(counts.begin(), counts.end(), counts[0]);
    return counts;
  }
  Bytes reduced(std::size_t count, int to = 0) const {
    std::vector<Bytes> inputs;
    std::vector<const void*> pointers;
    std::vector<double> factors;
    for (int r = 0; r < n_; ++r) {
      inputs.push_back(input_of(r, count, to));
      pointers.push_back(inputs.back().data());
      factors.push_back(factor_of(r));
    }
    Bytes out = poisoned(count);
    pyparallel::shm::ReduceArgs args;
    args.inputs = pointers.data();
    args.n = n_;
    args.out = out.data();
    args.count = count;
    args.dtype = dtype_;
    args.op = reduction_.op;
    args.factors = factors.data();
    args.divisor = n_;
    reference::reduce(args);
    return out;
  }
  void same(const char* op, const Bytes& got, const Bytes& expected) const {
    std::size_t at = 0;
    while (at < got.size() && got[at] == expected[at]) ++at;
    check::that(got.size() == expected.size() && at == got.size(), op, " ", name_of(reduction_.op),
                " ", name_of(dtype_), " call ", draw_.call, " rank ", me_, " of ", n_, ": ",
                got.size(), " bytes, first difference at ", at);
  }

  void all_reduce() {
    const std::size_t count = size();
    Bytes in = input_of(me_, count), out = poisoned(count);
    if (common_.one_in(2)) {
      comm_.all_reduce(in.data(), out.data(), count, dtype_, reduction_, soon());
    } else {
      out = std::move(in);
      comm_.all_reduce(out.data(), out.data(), count, dtype_, reduction_, soon());
    }
    same("all_reduce", out, reduced(count));
  }
  void reduce() {
    const std::size_t count = size();
    const Bytes in = input_of(me_, count);
    Bytes out = poisoned(me_ == root_ ? count : 0);
    comm_.reduce(in.data(), out.data(), count, dtype_, reduction_, root_, soon());
    if (me_ == root_) same("reduce", out, reduced(count));
  }
  void reduce_scatter() {
    const auto counts = sizes();
    std::vector<Bytes> in;
    std::vector<ConstBlock> blocks;
    for (int r = 0; r < n_; ++r) in.push_back(input_of(me_, counts[r], r));
    for (int r = 0; r < n_; ++r) blocks.push_back({in[r].data(), counts[r]});
    Bytes out = poisoned(counts[me_]);
    comm_.reduce_scatter(blocks.data(), out.data(), dtype_, reduction_, soon());
    same("reduce_scatter", out, reduced(counts[me_], me_));
  }
  void all_gather() {
    const auto counts = sizes();
    const Bytes in = input_of(me_, counts[me_]);
    std::vector<Bytes> out;
    std::vector<Block> blocks;
    for (int r = 0; r < n_; ++r) out.push_back(poisoned(counts[r]));
    for (int r = 0; r < n_; ++r) blocks.push_back({out[r].data(), counts[r]});
    comm_.all_gather(in.data(), blocks.data(), dtype_, soon());
    for (int r = 0; r < n_; ++r) same("all_gather", out[r], input_of(r, counts[r]));
  }
  void all_to_all() {
    std::vector<std::vector<std::size_t>> counts;  // [from][to]
    for (int r = 0; r < n_; ++r) counts.push_back(sizes());
    if (common_.one_in(2)) std::fill(counts.begin(), counts.end(), std::vector(n_, counts[0][0]));
    std::vector<Bytes> in, out;
    std::vector<ConstBlock> send;
    std::vector<Block> receive;
    for (int r = 0; r < n_; ++r) {
      in.push_back(input_of(me_, counts[me_][r], r));
      out.push_back(poisoned(counts[r][me_]));
    }
    for (int r = 0; r < n_; ++r) {
      send.push_back({in[r].data(), counts[me_][r]});
      receive.push_back({out[r].data(), counts[r][me_]});
    }
    comm_.all_to_all(send.data(), receive.data(), dtype_, soon());
    for (int r = 0; r < n_; ++r) same("all_to_all", out[r], input_of(r, counts[r][me_], me_));
  }
  void broadcast() {
    const std::size_t count = size();
    Bytes out = me_ == root_ ? input_of(root_, count) : poisoned(count);
    comm_.broadcast(out.data(), count, dtype_, root_, soon());
    same("broadcast", out, input_of(root_, count));
  }
  void scatter() {
    const auto counts = sizes();
    std::vector<Bytes> in;
    std::vector<ConstBlock> blocks;
    for (int r = 0; r < n_; ++r) in.push_back(input_of(root_, counts[r], r));
    for (int r = 0; r < n_; ++r) blocks.push_back({in[r].data(), counts[r]});
    Bytes out = poisoned(counts[me_]);
    comm_.scatter(blocks.data(), {out.data(), counts[me_]}, dtype_, root_, soon());
    same("scatter", out, in[me_]);
  }
  void gather() {
    const auto counts = sizes();
    const Bytes in = input_of(me_, counts[me_]);
    std::vector<Bytes> out;
    std::vector<Block> blocks;
    for (int r = 0; r < n_; ++r) out.push_back(poisoned(counts[r]));
    for (int r = 0; r < n_; ++r) blocks.push_back({out[r].data(), counts[r]});
    comm_.gather({in.data(), counts[me_]}, blocks.data(), dtype_, root_, soon());
    for (int r = 0; r < n_ && me_ == root_; ++r) same("gather", out[r], input_of(r, counts[r]));
  }

  Communicator& comm_;
  const int n_, me_;
  const Draw draw_;
  Numbers common_;
  DType dtype_;
  Reduction reduction_;
  int root_;
};

}  // namespace ranks
