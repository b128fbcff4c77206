// Reductions between ranks of several hosts.
#include <ATen/ATen.h>

#include <numeric>

#include "shm/reduce.h"
#include "torch/hierarchical.h"

namespace pyparallel::dist {
namespace {

// 16-bit floats are carried and added as fp32 until the end.
DType wide(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16 ? DType::f32 : dtype; }

at::ScalarType float_type(DType dtype) {
  return dtype == DType::f16 ? at::kHalf : dtype == DType::bf16 ? at::kBFloat16 : at::kFloat;
}

at::Tensor bytes(std::size_t count, DType dtype) {
  return at::empty({static_cast<std::int64_t>(count * size_of(dtype))}, at::kByte);
}

void convert(const void* in, DType from, void* out, DType to, std::size_t count) {
  if (from == to) {
    if (in != out) shm::copy(out, in, count * size_of(to), shm::Store::cached);
    return;
  }
  const std::vector<std::int64_t> size{static_cast<std::int64_t>(count)};
  at::from_blob(out, size, float_type(to))
      .copy_(at::from_blob(const_cast<void*>(in), size, float_type(from)));
}

// Equal parts of `count` elements, one per host, the first ones longer.
struct Part {
  std::size_t begin = 0;
  std::size_t count = 0;
};
std::vector<Part> parts_of(std::size_t count, int hosts) {
  std::vector<Part> parts;
  const auto n = static_cast<std::size_t>(hosts);
  for (std::size_t h = 0; h < n; ++h) {
    const std::size_t begin = parts.empty() ? 0 : parts.back().begin + parts.back().count;
    parts.push_back({begin, count / n + (h < count % n ? 1 : 0)});
  }
  return parts;
}

std::byte* at_element(const at::Tensor& buffer, std::size_t index, DType dtype) {
  return static_cast<std::byte*>(buffer.data_ptr()) + index * size_of(dtype);
}

void check_reduction(DType dtype, shm::Reduction reduction) {
  PYPARALLEL_REQUIRE(dtype < DType::count_ && is_defined(reduction.op, dtype), "reduction ",
                     name_of(reduction.op), " is not defined on ", name_of(dtype));
}

}  // namespace

// Leaves the sum over this host's ranks (in the wide type) in `partial` on the leader. An average
// is divided at the very end; factors apply here, where each rank has its own.
void HierarchicalCommunicator::reduce_on_host(const void* in, void* partial, std::size_t count,
                                              DType dtype, shm::Reduction reduction,
                                              Deadline deadline) {
  if (reduction.op == ReduceOp::avg) reduction.op = ReduceOp::sum;
  at::Tensor widened;
  if (wide(dtype) != dtype) {
    widened = bytes(count, wide(dtype));
    convert(in, dtype, widened.data_ptr(), wide(dtype), count);
    in = widened.data_ptr();
  }
  local_->reduce(in, partial, count, wide(dtype), reduction, 0, deadline);
}

// Adds the hosts' partial results in the order of the hosts and rounds to `dtype`.
void HierarchicalCommunicator::combine_hosts(const std::vector<const void*>& partials, void* out,
                                             std::size_t count, DType dtype, ReduceOp op) const {
  const DType type = wide(dtype);
  const at::Tensor sum = type == dtype ? at::Tensor() : bytes(count, type);
  shm::ReduceArgs args;
  args.inputs = partials.data();
  args.n = static_cast<int>(partials.size());
  args.out = type == dtype ? out : sum.data_ptr();
  args.count = count;
  args.dtype = type;
  args.op = op == ReduceOp::premul_sum ? ReduceOp::sum : op;
  args.divisor = size();
  shm::reduce(args);
  if (type != dtype) convert(sum.data_ptr(), type, out, dtype, count);
}

// Across: leader h receives part h of every host's partial result, adds, and gives its part to all.
void HierarchicalCommunicator::all_reduce(const void* in, void* out, std::size_t count, DType dtype,
                                          shm::Reduction reduction, Deadline deadline) {
  Call call;
  call.op = Op::all_reduce;
  call.dtype = dtype;
  call.reduction = reduction.op;
  call.count = count;
  collective(
      call, deadline, [&] { check_reduction(dtype, reduction); },
      [&] {
        if (count == 0) return;
        const DType type = wide(dtype);
        const at::Tensor partial = bytes(is_leader() ? count : 0, type);
        reduce_on_host(in, partial.data_ptr(), count, dtype, reduction, deadline);
        if (is_leader()) {
          const std::vector<Part> parts = parts_of(count, hosts());
          const Part own = parts[static_cast<std::size_t>(host_)];
          const at::Tensor theirs = bytes(own.count * static_cast<std::size_t>(hosts()), type);
          std::vector<const void*> partials(static_cast<std::size_t>(hosts()));
          std::vector<Links::Transfer> sends;
          std::vector<Links::Transfer> receives;
          for (int h = 0; h < hosts(); ++h) {
            const auto index = static_cast<std::size_t>(h);
            void* const landing = at_element(theirs, index * own.count, type);
            partials[index] = h == host_ ? at_element(partial, own.begin, type) : landing;
            if (h == host_) continue;
            sends.push_back({h, at_element(partial, parts[index].begin, type),
                             parts[index].count * size_of(type)});
            receives.push_back({h, landing, own.count * size_of(type)});
          }
          transfer(sends, receives, deadline);
          auto* const result = static_cast<std::byte*>(out);
          const auto place = [&](const Part& part) { return result + part.begin * size_of(dtype); };
          combine_hosts(partials, place(own), own.count, dtype, reduction.op);
          sends.clear();
          receives.clear();
          for (int h = 0; h < hosts(); ++h) {
            if (h == host_) continue;
            const Part& part = parts[static_cast<std::size_t>(h)];
            sends.push_back({h, place(own), own.count * size_of(dtype)});
            receives.push_back({h, place(part), part.count * size_of(dtype)});
          }
          transfer(sends, receives, deadline);
        }
        local_->broadcast(out, count, dtype, 0, deadline);
      });
}

void HierarchicalCommunicator::reduce(const void* in, void* out, std::size_t count, DType dtype,
                                      shm::Reduction reduction, int root, Deadline deadline) {
  Call call;
  call.op = Op::reduce;
  call.dtype = dtype;
  call.reduction = reduction.op;
  call.root = root;
  call.count = count;
  const auto check = [&] {
    check_reduction(dtype, reduction);
    check_rank("root", root);
  };
  collective(call, deadline, check, [&] {
    if (count == 0) return;
    const DType type = wide(dtype);
    const std::size_t size = count * size_of(type);
    const at::Tensor partial = bytes(is_leader() ? count : 0, type);
    reduce_on_host(in, partial.data_ptr(), count, dtype, reduction, deadline);
    if (!is_local(root)) {
      if (is_leader()) transfer({{host_of(root), partial.data_ptr(), size}}, {}, deadline);
      return;
    }
    // The root's own array, or on another leader one that is handed down.
    const at::Tensor staged = bytes(is_leader() && seat_.rank != root ? count : 0, dtype);
    void* const result = seat_.rank == root ? out : staged.data_ptr();
    if (is_leader()) {
      const at::Tensor theirs = bytes(count * static_cast<std::size_t>(hosts()), type);
      std::vector<const void*> partials;
      std::vector<Links::Transfer> receives;
      for (int h = 0; h < hosts(); ++h) {
        void* const landing = at_element(theirs, static_cast<std::size_t>(h) * count, type);
        partials.push_back(h == host_ ? partial.data_ptr() : landing);
        if (h != host_) receives.push_back({h, landing, size});
      }
      transfer({}, receives, deadline);
      combine_hosts(partials, result, count, dtype, reduction.op);
    }
    hand_down(result, count * size_of(dtype), root, deadline);
  });
}

// The blocks are laid out host by host, so that what one host needs is one piece.
void HierarchicalCommunicator::reduce_scatter(const shm::ConstBlock* in, void* out, DType dtype,
                                              shm::Reduction reduction, Deadline deadline) {
  Counts counts;
  for (int rank = 0; rank < size(); ++rank) {
    counts.push_back(static_cast<std::int64_t>(in[rank].count));
  }
  Call call;
  call.op = Op::reduce_scatter;
  call.dtype = dtype;
  call.reduction = reduction.op;
  call.count = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
  call.digest = digest_of(counts);
  collective(
      call, deadline, [&] { check_reduction(dtype, reduction); },
      [&] {
        if (call.count == 0) return;
        const DType type = wide(dtype);
        const at::Tensor packed = bytes(call.count, dtype);
        std::vector<Part> pieces;  // of each host, in elements of the packed array
        std::size_t offset = 0;
        for (int h = 0; h < hosts(); ++h) {
          pieces.push_back({offset, 0});
          for (const int rank : ranks_of(h)) {
            shm::copy(at_element(packed, offset, dtype), in[rank].data,
                      in[rank].count * size_of(dtype), shm::Store::cached);
            offset += in[rank].count;
          }
          pieces.back().count = offset - pieces.back().begin;
        }
        const at::Tensor partial = bytes(is_leader() ? call.count : 0, type);
        reduce_on_host(packed.data_ptr(), partial.data_ptr(), call.count, dtype, reduction,
                       deadline);
        const Part own = pieces[static_cast<std::size_t>(host_)];
        const at::Tensor result = bytes(is_leader() ? own.count : 0, dtype);
        std::vector<shm::ConstBlock> blocks;
        if (is_leader()) {
          const at::Tensor theirs = bytes(own.count * static_cast<std::size_t>(hosts()), type);
          std::vector<const void*> partials;
          std::vector<Links::Transfer> sends;
          std::vector<Links::Transfer> receives;
          for (int h = 0; h < hosts(); ++h) {
            const auto index = static_cast<std::size_t>(h);
            void* const landing = at_element(theirs, index * own.count, type);
            partials.push_back(h == host_ ? at_element(partial, own.begin, type) : landing);
            if (h == host_) continue;
            sends.push_back({h, at_element(partial, pieces[index].begin, type),
                             pieces[index].count * size_of(type)});
            receives.push_back({h, landing, own.count * size_of(type)});
          }
          transfer(sends, receives, deadline);
          combine_hosts(partials, result.data_ptr(), own.count, dtype, reduction.op);
          std::size_t begin = 0;
          for (const int rank : local_ranks()) {
            blocks.push_back({at_element(result, begin, dtype), in[rank].count});
            begin += blocks.back().count;
          }
        }
        local_->scatter(blocks.data(), {out, in[seat_.rank].count}, dtype, 0, deadline);
      });
}

}  // namespace pyparallel::dist
