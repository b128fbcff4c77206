#include "cuda/calls.h"

#include "base/error.h"

namespace pyparallel::cuda {

namespace {

// Mixes one more value in (the finaliser of a 64-bit multiplicative hash).
std::uint64_t mix(std::uint64_t h, std::uint64_t value) {
  h = (h ^ value) * 0x9e3779b97f4a7c15ull;
  return h ^ (h >> 29);
}

bool is_collective(Op op) { return op >= Op::all_reduce_one_shot && op <= Op::reduce_scatter; }

// Element counts of the user's arrays.
struct Extent {
  std::uint64_t in, out;
};
Extent extent_of(const Request& r, std::uint64_t world) {
  return {r.op == Op::reduce_scatter ? r.count * world : r.count,
          r.op == Op::all_gather ? r.count * world : r.count};
}

bool allowed_overlap(const Request& r, const Seat& seat) {
  const std::size_t size = size_of(r.dtype);
  const auto in = reinterpret_cast<std::uintptr_t>(r.in);
  const auto out = reinterpret_cast<std::uintptr_t>(r.out);
  const Extent n = extent_of(r, seat.layout.world);
  if (in + n.in * size <= out || out + n.out * size <= in) return true;
  const std::uint64_t share = seat.rank * r.count * size;
  if (r.op == Op::all_gather) return in == out + share;
  if (r.op == Op::reduce_scatter) return out == in + share;
  return in == out;
}

}  // namespace

std::uint32_t signature_of(const Request& request, const WorkspaceLayout& layout,
                           std::uint64_t launch_count) {
  std::uint64_t h = mix(0, launch_count);
  h = mix(h, request.count);
  h = mix(h, static_cast<std::uint64_t>(request.grid.threads));
  h = mix(h, layout.world);
  h = mix(h, layout.max_blocks);
  h = mix(h, layout.signals);
  h = mix(h, layout.slot_bytes);
  return static_cast<std::uint32_t>(request.op) << 28 |
         static_cast<std::uint32_t>(request.dtype) << 24 |
         static_cast<std::uint32_t>(request.grid.blocks & 0xff) << 16 |
         static_cast<std::uint32_t>(h >> 48);
}

std::string describe_signature(std::uint32_t signature) {
  const auto op = static_cast<Op>(signature >> 28);
  std::ostringstream out;
  out << name_of(op);
  if (op != Op::barrier) out << " of " << name_of(static_cast<DType>(signature >> 24 & 0xf));
  out << ", grid " << (signature >> 16 & 0xff) << ", sizes 0x" << std::hex << (signature & 0xffff);
  return out.str();
}

std::uint64_t launch_capacity(Op op, DType dtype, const WorkspaceLayout& layout) {
  const std::uint64_t slot = layout.slot_bytes / size_of(dtype);
  const bool by_chunks = op == Op::all_reduce_two_shot || op == Op::all_reduce_multimem;
  return by_chunks ? slot * layout.world : slot;
}

std::string layout_misfit(const WorkspaceLayout& l) {
  if (l.world < 1 || l.world > kMaxWorld) {
    return str("workspace for ", l.world, " ranks: 1 to ", kMaxWorld, " are possible");
  }
  if (l.max_blocks < 1 || l.max_blocks > kMaxBlocks) {
    return str("workspace for grids of ", l.max_blocks, " blocks: 1 to ", kMaxBlocks,
               " are possible");
  }
  // The bound keeps 4 * world * slot_bytes far from 2^63.
  if (l.slot_bytes < kLine || l.slot_bytes % kLine != 0 || l.slot_bytes > (1ull << 40)) {
    return str("workspace slots of ", l.slot_bytes, " bytes: a multiple of ", kLine, " from ",
               kLine, " to 2^40 is possible");
  }
  if (l.signals > (1u << 20)) {
    return str("workspace with ", l.signals, " signals: up to 2^20 are possible");
  }
  return "";
}

std::string request_misfit(const Request& r, const Seat& seat) {
  const WorkspaceLayout& l = seat.layout;
  const int world = static_cast<int>(l.world);
  if (std::string why = layout_misfit(l); !why.empty()) return why;
  if (r.op >= Op::count_) return str("op code ", static_cast<int>(r.op), " does not exist");
  const std::string where = str(name_of(r.op), ", rank ", seat.rank, " of ", world, ": ");
  if (seat.rank < 0 || seat.rank >= world) return where + "no such rank";
  for (int p = 0; p < world; ++p) {
    const auto address = reinterpret_cast<std::uintptr_t>(seat.peers[p]);
    if (address == 0 || address % kLine != 0) {
      return str(where, "workspace address of rank ", p, " is ", seat.peers[p],
                 "; it must be a multiple of ", kLine, " and not null");
    }
  }
  if (seat.status == nullptr) return where + "no status page";
  if (r.timeout_ns == 0) return where + "timeout of 0 ns: a wait needs time to look at least once";
  if (r.op == Op::put_signal || r.op == Op::wait_signal) {
    if (r.index >= l.signals) {
      return str(where, "signal ", r.index, " of a workspace with ", l.signals);
    }
    if (r.op == Op::put_signal && (r.peer < 0 || r.peer >= world)) {
      return str(where, "no rank ", r.peer, " to signal");
    }
    return "";
  }
  if (r.grid.blocks < 1 || r.grid.blocks > static_cast<int>(l.max_blocks)) {
    return str(where, "grid of ", r.grid.blocks, " blocks; this workspace has flags for 1 to ",
               l.max_blocks);
  }
  if (r.grid.threads < 1 || r.grid.threads > 512) {
    return str(where, "blocks of ", r.grid.threads, " threads; 1 to 512 are possible");
  }
  if (!is_collective(r.op)) return "";
  if (r.dtype != DType::f32 && r.dtype != DType::f16 && r.dtype != DType::bf16) {
    return str(where, name_of(r.dtype), " elements; float32, float16 and bfloat16 are possible");
  }
  const std::size_t size = size_of(r.dtype);
  if (r.count > (1ull << 62) / (size * l.world)) {
    return str(where, r.count, " elements per rank exceed the address space");
  }
  if (r.count == 0) return "";
  for (const void* p : {r.in, static_cast<const void*>(r.out)}) {
    if (p == nullptr || reinterpret_cast<std::uintptr_t>(p) % size != 0) {
      return str(where, p == r.in ? "input" : "output", " address ", p,
                 "; it must be a multiple of ", size, " (", name_of(r.dtype), ") and not null");
    }
  }
  if (!allowed_overlap(r, seat)) {
    return where +
           "input and output overlap without being the same place: use the in-place form or "
           "separate arrays";
  }
  if (r.op == Op::all_reduce_multimem && seat.multicast == nullptr) {
    return where +
           "this workspace has no multicast address; the one-shot and two-shot forms need none";
  }
  return "";
}

}  // namespace pyparallel::cuda
