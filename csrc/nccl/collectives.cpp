// Data calls: checked here, then queued in the thread's group or launched.
#include <numeric>

#include "nccl/communicator.h"
#include "nccl/group.h"

namespace pyparallel::nccl {
namespace {

std::string operands(const char* call, std::size_t count, const Element& element,
                     const char* more = "", int rank = -1) {
  std::string text = str(call, "(count ", count, ", ", element.name);
  if (*more != '\0') text += str(", ", more);
  if (rank >= 0) text += str(" ", rank);
  return text + ")";
}

std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

const std::byte* at(const void* base, std::size_t bytes) {
  return static_cast<const std::byte*>(base) + bytes;
}
std::byte* at(void* base, std::size_t bytes) { return static_cast<std::byte*>(base) + bytes; }

}  // namespace

std::size_t bytes_of(std::size_t count, const Element& element) {
  const std::size_t each = element.units * info_of(element.type).bytes;
  PYPARALLEL_REQUIRE(count <= std::size_t(PTRDIFF_MAX) / each, count, " elements of ", element.name,
                     " are more than memory can hold");
  return count * each;
}

// --- checks

void Communicator::check_call(const void* in, const void* out, std::size_t in_bytes,
                              std::size_t out_bytes, std::size_t in_place_offset,
                              const char* what) const {
  require_usable();
  PYPARALLEL_REQUIRE(in != nullptr || in_bytes == 0, where(), ": ", what, ": the input is null, ",
                     in_bytes, " bytes are to be read");
  PYPARALLEL_REQUIRE(out != nullptr || out_bytes == 0, where(), ": ", what,
                     ": the output is null, ", out_bytes, " bytes are to be written");
  if (in == nullptr || out == nullptr || in_bytes == 0 || out_bytes == 0) return;
  const std::uintptr_t i = address(in), o = address(out);
  if (i >= o + out_bytes || o >= i + in_bytes) return;
  // In place: the smaller array is this rank's part of the larger one.
  const bool in_place = in_bytes <= out_bytes ? i == o + in_place_offset : o == i + in_place_offset;
  PYPARALLEL_REQUIRE(in_place, where(), ": ", what, ": input (", in_bytes, " bytes) and output (",
                     out_bytes, " bytes) overlap; in place means that the smaller begins ",
                     in_place_offset, " bytes into the larger");
}

void Communicator::check_rank(int rank, const char* role, const char* what) const {
  PYPARALLEL_REQUIRE(rank >= 0 && rank < size_, where(), ": ", what, ": ", role, " ", rank,
                     " is not in 0..", size_ - 1);
}

RedOp Communicator::reduction_of(const Reduction& reduction, const Element& element,
                                 const char* what) const {
  const DataTypeInfo& type = info_of(element.type);
  if (reduction.op == ReduceOp::premul_sum) {
    PYPARALLEL_REQUIRE(reduction.premul_sum != nullptr, where(), ": ", what,
                       ": premul_sum needs a PreMulSum with this rank's factor");
    PYPARALLEL_REQUIRE(reduction.premul_sum->belongs_to(*this), where(), ": ", what,
                       ": the PreMulSum belongs to another communicator");
    PYPARALLEL_REQUIRE(
        reduction.premul_sum->type() == element.type && element.reducible && !element.boolean,
        where(), ": ", what, ": the PreMulSum is for ", info_of(reduction.premul_sum->type()).name,
        ", the data are ", element.name);
    return reduction.premul_sum->op();
  }
  const RedOp op = red_op_of(reduction.op, element);
  const int since = std::max(type.since, op == RedOp::avg ? version_code(2, 10, 3) : 0);
  if (library().version() < since) {
    throw Unsupported(str(where(), ": ", what, ": ", pyparallel::name_of(reduction.op), " of ",
                          element.name, " came with NCCL ", version_text(since), "; found ",
                          library().describe()));
  }
  return op;
}

void Communicator::submit(Stream stream, std::string text, std::function<Result(RawComm)> call) {
  Group::submit({shared_from_this(), stream, std::move(call), std::move(text)});
}

// --- equal counts

void Communicator::all_reduce(const void* in, void* out, std::size_t count, Element e,
                              const Reduction& reduction, Stream stream) {
  const std::size_t bytes = bytes_of(count, e);
  check_call(in, out, bytes, bytes, 0, "all_reduce");
  const RedOp op = reduction_of(reduction, e, "all_reduce");
  submit(stream, operands("ncclAllReduce", count, e, pyparallel::name_of(reduction.op)),
         [=, &l = library(), keep = reduction.premul_sum](RawComm comm) {
           return l->AllReduce(in, out, count, e.type, op, comm, stream);
         });
}

void Communicator::reduce(const void* in, void* out, std::size_t count, Element e,
                          const Reduction& reduction, int root, Stream stream) {
  check_rank(root, "root", "reduce");
  const std::size_t bytes = bytes_of(count, e);
  check_call(in, out, bytes, rank_ == root ? bytes : 0, 0, "reduce");
  const RedOp op = reduction_of(reduction, e, "reduce");
  submit(stream, operands("ncclReduce", count, e, "root", root),
         [=, &l = library(), keep = reduction.premul_sum](RawComm comm) {
           return l->Reduce(in, out, count, e.type, op, root, comm, stream);
         });
}

void Communicator::bcast(void* data, std::size_t count, Element e, int root, Stream stream) {
  PYPARALLEL_NCCL_NEED(library(), Bcast);
  check_rank(root, "root", "bcast");
  e = movable(e);
  check_call(data, data, bytes_of(count, e), bytes_of(count, e), 0, "bcast");
  submit(stream, operands("ncclBcast", count, e, "root", root), [=, &l = library()](RawComm comm) {
    return l->Bcast(data, count * e.units, e.type, root, comm, stream);
  });
}

void Communicator::broadcast(const void* in, void* out, std::size_t count, Element e, int root,
                             Stream stream) {
  check_rank(root, "root", "broadcast");
  e = movable(e);
  const std::size_t bytes = bytes_of(count, e);
  check_call(in, out, rank_ == root ? bytes : 0, bytes, 0, "broadcast");
  submit(stream, operands("ncclBroadcast", count, e, "root", root),
         [=, &l = library()](RawComm comm) {
           return l->Broadcast(in, out, count * e.units, e.type, root, comm, stream);
         });
}

void Communicator::reduce_scatter(const void* in, void* out, std::size_t out_count, Element e,
                                  const Reduction& reduction, Stream stream) {
  const std::size_t bytes = bytes_of(out_count, e);
  check_call(in, out, bytes * size_, bytes, bytes * rank_, "reduce_scatter");
  const RedOp op = reduction_of(reduction, e, "reduce_scatter");
  submit(stream, operands("ncclReduceScatter", out_count, e, pyparallel::name_of(reduction.op)),
         [=, &l = library(), keep = reduction.premul_sum](RawComm comm) {
           return l->ReduceScatter(in, out, out_count, e.type, op, comm, stream);
         });
}

void Communicator::all_gather(const void* in, void* out, std::size_t in_count, Element e,
                              Stream stream) {
  e = movable(e);
  const std::size_t bytes = bytes_of(in_count, e);
  check_call(in, out, bytes, bytes * size_, bytes * rank_, "all_gather");
  submit(stream, operands("ncclAllGather", in_count, e), [=, &l = library()](RawComm comm) {
    return l->AllGather(in, out, in_count * e.units, e.type, comm, stream);
  });
}

void Communicator::all_to_all(const void* in, void* out, std::size_t count, Element e,
                              Stream stream) {
  e = movable(e);
  const std::size_t bytes = bytes_of(count, e);
  // Not in place: NCCL says nothing of what happens then.
  check_call(in, out, bytes * size_, bytes * size_, PTRDIFF_MAX, "all_to_all");
  if (library()->AlltoAll != nullptr) {
    submit(stream, operands("ncclAlltoAll", count, e), [=, &l = library()](RawComm comm) {
      return l->AlltoAll(in, out, count * e.units, e.type, comm, stream);
    });
    return;
  }
  std::vector<ConstBlock> from(size_);
  std::vector<Block> to(size_);
  for (int r = 0; r < size_; ++r) {
    from[r] = {at(in, bytes * r), count};
    to[r] = {at(out, bytes * r), count};
  }
  all_to_all(from, to, e, stream);
}

void Communicator::gather(const void* in, void* out, std::size_t in_count, Element e, int root,
                          Stream stream) {
  check_rank(root, "root", "gather");
  e = movable(e);
  const std::size_t bytes = bytes_of(in_count, e);
  check_call(in, out, bytes, rank_ == root ? bytes * size_ : 0, bytes * rank_, "gather");
  if (library()->Gather != nullptr) {
    submit(stream, operands("ncclGather", in_count, e, "root", root),
           [=, &l = library()](RawComm comm) {
             return l->Gather(in, out, in_count * e.units, e.type, root, comm, stream);
           });
    return;
  }
  std::vector<Block> to(size_);
  for (int r = 0; r < size_ && rank_ == root; ++r) to[r] = {at(out, bytes * r), in_count};
  gather({in, in_count}, to, e, root, stream);
}

void Communicator::scatter(const void* in, void* out, std::size_t out_count, Element e, int root,
                           Stream stream) {
  check_rank(root, "root", "scatter");
  e = movable(e);
  const std::size_t bytes = bytes_of(out_count, e);
  check_call(in, out, rank_ == root ? bytes * size_ : 0, bytes, bytes * rank_, "scatter");
  if (library()->Scatter != nullptr) {
    submit(stream, operands("ncclScatter", out_count, e, "root", root),
           [=, &l = library()](RawComm comm) {
             return l->Scatter(in, out, out_count * e.units, e.type, root, comm, stream);
           });
    return;
  }
  std::vector<ConstBlock> from(size_);
  for (int r = 0; r < size_ && rank_ == root; ++r) from[r] = {at(in, bytes * r), out_count};
  scatter(from, {out, out_count}, e, root, stream);
}

// --- one block per rank

void Communicator::check_blocks(std::size_t blocks, const char* what) const {
  PYPARALLEL_REQUIRE(blocks == static_cast<std::size_t>(size_), where(), ": ", what, ": ", blocks,
                     " blocks for ", size_, " ranks");
}

void Communicator::reduce_scatter(const std::vector<ConstBlock>& in, void* out, Element e,
                                  const Reduction& reduction, Stream stream) {
  check_blocks(in.size(), "reduce_scatter");
  Group group;
  for (int r = 0; r < size_; ++r) {
    if (in[r].count > 0)
      reduce(in[r].data, r == rank_ ? out : nullptr, in[r].count, e, reduction, r, stream);
  }
  group.run();
}

void Communicator::all_gather(const void* in, const std::vector<Block>& out, Element e,
                              Stream stream) {
  check_blocks(out.size(), "all_gather");
  Group group;
  for (int r = 0; r < size_; ++r) {
    if (out[r].count > 0)
      broadcast(r == rank_ ? in : nullptr, out[r].data, out[r].count, e, r, stream);
  }
  group.run();
}

void Communicator::all_to_all(const std::vector<ConstBlock>& in, const std::vector<Block>& out,
                              Element e, Stream stream) {
  check_blocks(in.size(), "all_to_all, input");
  check_blocks(out.size(), "all_to_all, output");
  PYPARALLEL_REQUIRE(in[rank_].count == out[rank_].count, where(),
                     ": all_to_all: ", in[rank_].count, " elements from this rank to itself, ",
                     out[rank_].count, " expected");
  Group group;
  for (int r = 0; r < size_; ++r) {
    if (in[r].count > 0) send(in[r].data, in[r].count, e, r, stream);
    if (out[r].count > 0) recv(out[r].data, out[r].count, e, r, stream);
  }
  group.run();
}

void Communicator::gather(ConstBlock in, const std::vector<Block>& out, Element e, int root,
                          Stream stream) {
  check_rank(root, "root", "gather");
  Group group;
  if (rank_ == root) {
    check_blocks(out.size(), "gather");
    PYPARALLEL_REQUIRE(out[rank_].count == in.count, where(), ": gather: this rank gives ",
                       in.count, " elements, its block has ", out[rank_].count);
    for (int r = 0; r < size_; ++r) {
      const bool own_in_place = r == rank_ && out[r].data == in.data;
      if (out[r].count > 0 && !own_in_place) recv(out[r].data, out[r].count, e, r, stream);
      if (r == rank_ && in.count > 0 && !own_in_place) send(in.data, in.count, e, r, stream);
    }
  } else if (in.count > 0) {
    send(in.data, in.count, e, root, stream);
  }
  group.run();
}

void Communicator::scatter(const std::vector<ConstBlock>& in, Block out, Element e, int root,
                           Stream stream) {
  check_rank(root, "root", "scatter");
  Group group;
  if (rank_ == root) {
    check_blocks(in.size(), "scatter");
    PYPARALLEL_REQUIRE(in[rank_].count == out.count, where(), ": scatter: this rank takes ",
                       out.count, " elements, its block has ", in[rank_].count);
    for (int r = 0; r < size_; ++r) {
      const bool own_in_place = r == rank_ && in[r].data == out.data;
      if (in[r].count > 0 && !own_in_place) send(in[r].data, in[r].count, e, r, stream);
      if (r == rank_ && out.count > 0 && !own_in_place) recv(out.data, out.count, e, r, stream);
    }
  } else if (out.count > 0) {
    recv(out.data, out.count, e, root, stream);
  }
  group.run();
}

// --- point to point

void Communicator::send(const void* data, std::size_t count, Element e, int peer, Stream stream) {
  PYPARALLEL_NCCL_NEED(library(), Send);
  check_rank(peer, "peer", "send");
  e = movable(e);
  check_call(data, nullptr, bytes_of(count, e), 0, 0, "send");
  submit(stream, operands("ncclSend", count, e, "to", peer), [=, &l = library()](RawComm comm) {
    return l->Send(data, count * e.units, e.type, peer, comm, stream);
  });
}

void Communicator::recv(void* data, std::size_t count, Element e, int peer, Stream stream) {
  PYPARALLEL_NCCL_NEED(library(), Recv);
  check_rank(peer, "peer", "recv");
  e = movable(e);
  check_call(nullptr, data, 0, bytes_of(count, e), 0, "recv");
  submit(stream, operands("ncclRecv", count, e, "from", peer), [=, &l = library()](RawComm comm) {
    return l->Recv(data, count * e.units, e.type, peer, comm, stream);
  });
}

// A library that is older than the type still moves it, as bytes.
Element Communicator::movable(Element element) const {
  const DataTypeInfo& type = info_of(element.type);
  if (library().version() >= type.since) return element;
  return {DataType::u8, element.units * type.bytes, false, false, element.name};
}

}  // namespace pyparallel::nccl
