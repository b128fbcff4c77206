// What is asked of the kernels (Request), what one launch gets (Call), and how the one becomes a
// series of the other. No CUDA here: launchers, loader and the emulation share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "cuda/workspace.h"

namespace pyparallel::cuda {

// Values are part of the flag word: append only, at most 16.
enum class Op : std::uint32_t {
  barrier,
  all_reduce_one_shot,
  all_reduce_two_shot,
  all_reduce_multimem,
  all_gather,
  reduce_scatter,
  put_signal,
  wait_signal,
  count_
};

constexpr const char* name_of(Op op) {
  constexpr const char* names[] = {"barrier",
                                   "all_reduce (one-shot)",
                                   "all_reduce (two-shot)",
                                   "all_reduce (multimem)",
                                   "all_gather",
                                   "reduce_scatter",
                                   "put_signal",
                                   "wait_signal"};
  return op < Op::count_ ? names[static_cast<int>(op)] : "unknown op";
}

// One rank's seat: addresses as this process (and its GPU) sees them. Plain data, copied into
// calls.
struct Seat {
  void* peers[kMaxWorld] = {};   // workspace of each rank, this one's own included
  void* multicast = nullptr;     // address of all workspaces at once; null where there is none
  StatusPage* status = nullptr;  // this rank's own; zero at first
  WorkspaceLayout layout;        // equal on all ranks
  std::int32_t rank = 0;
};

struct Grid {
  int blocks = 1;     // at most layout.max_blocks; equal on all ranks
  int threads = 512;  // a block's; equal on all ranks
};

// all_reduce: `count` elements from `in` to `out`. all_gather: `count` is one rank's share, `out`
// has world * count. reduce_scatter: `count` is one rank's share, `in` has world * count. In place
// means in == out; all_gather: in == out + rank * count; reduce_scatter: out == in + rank * count.
// No other overlap. barrier: neither. put_signal: adds `count` to signal `index` of rank `peer`,
// after all that this stream did before. wait_signal: waits until `count` more were put to this
// rank's signal `index`.
struct Request {
  Op op = Op::barrier;
  DType dtype = DType::f32;  // f32, f16 or bf16
  const void* in = nullptr;
  void* out = nullptr;
  std::uint64_t count = 0;
  std::uint32_t index = 0;
  std::int32_t peer = 0;
  Grid grid;
  std::uint64_t timeout_ns = 30'000'000'000;
};

// The argument of a kernel: one launch's share of a request. It holds no number that changes from
// call to call (the phase is in device memory), so a captured graph may replay it.
struct Call {
  Seat seat;
  const void* in = nullptr;
  void* out = nullptr;
  std::uint64_t count = 0;   // elements of this launch (of one share)
  std::uint64_t stride = 0;  // elements between the shares of two ranks in the user's array
  std::uint64_t timeout_ns = 0;
  std::uint32_t op = 0;
  std::uint32_t signature = 0;  // what all ranks must agree on; see below
  std::uint32_t index = 0;
  std::int32_t peer = 0;
};

// The low half of a flag word, [op:4][dtype:4][blocks:8][hash of sizes and layout:16]: the receiver
// compares it with its own, so that ranks which launch different things raise instead of waiting.
std::uint32_t signature_of(const Request& request, const WorkspaceLayout& layout,
                           std::uint64_t launch_count);
// "all_gather of bfloat16, grid 4, sizes 0x1f2e"
std::string describe_signature(std::uint32_t signature);

// Largest share that fits one launch, in elements.
std::uint64_t launch_capacity(Op op, DType dtype, const WorkspaceLayout& layout);

// Empty, or why the layout / the request cannot be served: what was asked, what was found, what
// works.
std::string layout_misfit(const WorkspaceLayout& layout);
std::string request_misfit(const Request& request, const Seat& seat);

// Calls launch(const Call&, Grid) for each launch of the request, in order; stops at its first
// result that is not 0 and returns that. The request must have no misfit.
template <typename Launch>
int for_each_call(const Request& request, const Seat& seat, Launch&& launch) {
  Call call;
  call.seat = seat;
  call.op = static_cast<std::uint32_t>(request.op);
  call.timeout_ns = request.timeout_ns;
  call.index = request.index;
  call.peer = request.peer;
  call.count = request.count;
  call.stride = request.count;
  if (request.op == Op::put_signal || request.op == Op::wait_signal)
    return launch(call, Grid{1, 32});
  if (request.op == Op::barrier) {
    call.signature = signature_of(request, seat.layout, 0);
    return launch(call, request.grid);
  }
  const std::uint64_t capacity = launch_capacity(request.op, request.dtype, seat.layout);
  for (std::uint64_t done = 0; done < request.count; done += call.count) {
    call.count = request.count - done < capacity ? request.count - done : capacity;
    call.in = static_cast<const char*>(request.in) + done * size_of(request.dtype);
    call.out = static_cast<char*>(request.out) + done * size_of(request.dtype);
    call.signature = signature_of(request, seat.layout, call.count);
    if (int error = launch(call, request.grid)) return error;
  }
  return 0;
}

}  // namespace pyparallel::cuda
