// The kernels: y = f(x_0, ..., x_{world-1}) over the ranks of a workspace. Protocol and reason why
// they make progress: wait.h. Layout: workspace.h. Every rank launches the same call with the same
// grid; block b of all ranks work on the same packs: those with pack % (blocks * threads) in its
// range.
//
// Data is pushed: a store towards a peer needs one way over the link, a load from it two. Own data
// takes the same way through the own slots, so that all slots are read alike. In-place calls are
// right because what a thread reads of a user's array it has read before it, or a block after a
// meeting that it took part in, overwrites it.
#pragma once

#include "cuda/elements.h"
#include "cuda/wait.h"

namespace pyparallel::cuda {

// do_pack(i) for the packs of this thread.
template <typename F>
PYPARALLEL_DEVICE void for_packs(std::size_t packs, F&& do_pack) {
  const Place at = here();
  const std::size_t step = std::size_t{at.blocks} * at.threads;
  for (std::size_t i = std::size_t{at.block} * at.threads + at.thread; i < packs; i += step) {
    do_pack(i);
  }
}

// Which rank is number `n` in this rank's order: each begins with its right neighbour, so that no
// link is everybody's first.
PYPARALLEL_DEVICE std::uint32_t rank_in_turn(const Call& call, std::uint32_t n) {
  const std::uint32_t r = static_cast<std::uint32_t>(call.seat.rank) + 1 + n;
  return r < call.seat.layout.world ? r : r - call.seat.layout.world;
}

// store(r, load(r)) for all ranks r. Four loads are under way before the first store: the compiler
// may not move a load over a store to an address it does not know, and one at a time would wait for
// each.
template <typename T, typename Load, typename Store>
PYPARALLEL_DEVICE void move_packs(const Call& call, Load&& load, Store&& store) {
  const std::uint32_t world = call.seat.layout.world;
  constexpr std::uint32_t batch = 4;
  for (std::uint32_t n = 0; n < world; n += batch) {
    Pack<T> p[batch];
#pragma unroll
    for (std::uint32_t k = 0; k < batch; ++k) {
      if (n + k < world) p[k] = load(rank_in_turn(call, n + k));
    }
#pragma unroll
    for (std::uint32_t k = 0; k < batch; ++k) {
      if (n + k < world) store(rank_in_turn(call, n + k), p[k]);
    }
  }
}

template <typename T>
PYPARALLEL_DEVICE Array<const T> input_of(const Call& call, std::uint64_t share = 0) {
  return {static_cast<const T*>(call.in) + share * call.stride, call.count};
}
template <typename T>
PYPARALLEL_DEVICE Array<T> output_of(const Call& call, std::uint64_t share = 0) {
  return {static_cast<T*>(call.out) + share * call.stride, call.count};
}

template <typename T>
PYPARALLEL_DEVICE Pack<T>* pack_at(const Call& call, std::uint32_t rank, std::size_t offset,
                                   std::size_t i) {
  return reinterpret_cast<Pack<T>*>(workspace_of(call, rank) + offset) + i;
}

// This rank's slots, rank 0's first.
PYPARALLEL_DEVICE const char* own_slots(const Call& call, const Phase& phase) {
  return workspace_of(call, call.seat.rank) + call.seat.layout.data(phase.buffer(), 0);
}

template <typename T>
PYPARALLEL_DEVICE void store_on_all(const Call& call, std::size_t offset, std::size_t i,
                                    const Pack<T>& p) {
  for (std::uint32_t n = 0; n < call.seat.layout.world; ++n) {
    *pack_at<T>(call, rank_in_turn(call, n), offset, i) = p;
  }
}

// This rank's input into its slot on every rank.
template <typename T>
PYPARALLEL_DEVICE void push_to_all(const Call& call, const Phase& phase, std::size_t packs) {
  const std::size_t slot = call.seat.layout.data(phase.buffer(), call.seat.rank);
  for_packs(packs,
            [&](std::size_t i) { store_on_all(call, slot, i, load_pack(input_of<T>(call), i)); });
}

// The sum of this rank's slots into its output.
template <typename T>
PYPARALLEL_DEVICE void sum_to_output(const Call& call, const Phase& phase, std::size_t packs) {
  const WorkspaceLayout& layout = call.seat.layout;
  const char* slots = own_slots(call, phase);
  for_packs(packs, [&](std::size_t i) {
    store_pack(output_of<T>(call), i, sum_slots<T>(slots, layout.slot_bytes, layout.world, i));
  });
}

// The sums of all chunks, chunk r in result slot r, into this rank's output.
template <typename T>
PYPARALLEL_DEVICE void sums_to_output(const Call& call, const Phase& phase, std::size_t packs,
                                      std::size_t chunk) {
  for_packs(chunk, [&](std::size_t i) {
    move_packs<T>(
        call,
        [&](std::uint32_t r) {
          const std::size_t slot = call.seat.layout.result(phase.buffer(), r);
          return *pack_at<T>(call, call.seat.rank, slot, i);
        },
        [&](std::uint32_t r, const Pack<T>& p) {
          if (r * chunk + i < packs) store_pack(output_of<T>(call), r * chunk + i, p);
        });
  });
}

PYPARALLEL_KERNEL barrier(PYPARALLEL_KERNEL_ARGUMENT(Call) call) {
  Phase phase;
  if (!begin(call, &phase) || !exchange(call, phase, 0)) return;
  finish(call, phase);
}

// y = sum of x: everybody gets everything, everybody adds. One meeting; world - 1 times the
// traffic.
template <typename T>
PYPARALLEL_KERNEL all_reduce_one_shot(PYPARALLEL_KERNEL_ARGUMENT(Call) call) {
  Phase phase;
  if (!begin(call, &phase)) return;
  const std::size_t packs = packs_in<T>(call.count);
  push_to_all<T>(call, phase, packs);
  if (!exchange(call, phase, 0)) return;
  sum_to_output<T>(call, phase, packs);
  finish(call, phase);
}

// y = sum of x, in chunks of `chunk` packs: rank r adds chunk r (first shot) and sends the sum to
// all (second shot). Two meetings; twice (world - 1) / world the traffic.
template <typename T>
PYPARALLEL_KERNEL all_reduce_two_shot(PYPARALLEL_KERNEL_ARGUMENT(Call) call) {
  Phase phase;
  if (!begin(call, &phase)) return;
  const WorkspaceLayout& layout = call.seat.layout;
  const std::size_t packs = packs_in<T>(call.count);
  const std::size_t chunk = (packs + layout.world - 1) / layout.world;
  const std::size_t slot = layout.data(phase.buffer(), call.seat.rank);
  for_packs(chunk, [&](std::size_t i) {
    move_packs<T>(
        call, [&](std::uint32_t r) { return load_pack(input_of<T>(call), r * chunk + i); },
        [&](std::uint32_t r, const Pack<T>& p) {
          if (r * chunk + i < packs) *pack_at<T>(call, r, slot, i) = p;
        });
  });
  if (!exchange(call, phase, 0)) return;
  const char* slots = own_slots(call, phase);
  const std::size_t sums = layout.result(phase.buffer(), call.seat.rank);
  for_packs(chunk, [&](std::size_t i) {
    if (call.seat.rank * chunk + i >= packs) return;
    store_on_all(call, sums, i, sum_slots<T>(slots, layout.slot_bytes, layout.world, i));
  });
  if (!exchange(call, phase, 1)) return;
  sums_to_output<T>(call, phase, packs, chunk);
  finish(call, phase);
}

// y = sum of x by the switch: rank r loads the sum of chunk r through the multicast address and
// stores it to all through the same. The switch chooses the order of the sum: all ranks still get
// the same bits in a call, but not those of the other kernels, nor surely those of the last run.
template <typename T>
PYPARALLEL_KERNEL all_reduce_multimem(PYPARALLEL_KERNEL_ARGUMENT(Call) call) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  Phase phase;
  if (!begin(call, &phase)) return;
  const WorkspaceLayout& layout = call.seat.layout;
  const std::size_t packs = packs_in<T>(call.count);
  const std::size_t chunk = (packs + layout.world - 1) / layout.world;
  const std::uint32_t me = static_cast<std::uint32_t>(call.seat.rank);
  const std::size_t data = layout.data(phase.buffer(), 0);
  const std::size_t sums = layout.result(phase.buffer(), 0);
  const Multicast all{static_cast<char*>(call.seat.multicast), call.seat.peers, layout.world};
  // Chunk r lies in slot r, on every rank.
  for_packs(chunk, [&](std::size_t i) {
    move_packs<T>(
        call, [&](std::uint32_t r) { return load_pack(input_of<T>(call), r * chunk + i); },
        [&](std::uint32_t r, const Pack<T>& p) {
          if (r * chunk + i < packs) *pack_at<T>(call, me, data + r * layout.slot_bytes, i) = p;
        });
  });
  order::fence_alias();
  if (!exchange(call, phase, 0)) return;
  order::fence_alias();
  for_packs(chunk, [&](std::size_t i) {
    if (me * chunk + i >= packs) return;
    const std::size_t offset = me * layout.slot_bytes + i * sizeof(Pack<T>);
    order::multimem_store(all, sums + offset, multimem_sum(all, data + offset, T{}));
  });
  order::fence_alias();
  if (!exchange(call, phase, 1)) return;
  order::fence_alias();
  sums_to_output<T>(call, phase, packs, chunk);
  finish(call, phase);
#endif  // launchers refuse older devices
}

// y_r = x_r of every rank r, side by side. `T` only says how wide an element is.
template <typename T>
PYPARALLEL_KERNEL all_gather(PYPARALLEL_KERNEL_ARGUMENT(Call) call) {
  Phase phase;
  if (!begin(call, &phase)) return;
  const WorkspaceLayout& layout = call.seat.layout;
  const std::size_t packs = packs_in<T>(call.count);
  push_to_all<T>(call, phase, packs);
  if (!exchange(call, phase, 0)) return;
  for_packs(packs, [&](std::size_t i) {
    move_packs<T>(
        call,
        [&](std::uint32_t r) {
          const std::size_t slot = layout.data(phase.buffer(), r);
          return *pack_at<T>(call, call.seat.rank, slot, i);
        },
        [&](std::uint32_t r, const Pack<T>& p) { store_pack(output_of<T>(call, r), i, p); });
  });
  finish(call, phase);
}

// y = sum over ranks of their share number `rank`.
template <typename T>
PYPARALLEL_KERNEL reduce_scatter(PYPARALLEL_KERNEL_ARGUMENT(Call) call) {
  Phase phase;
  if (!begin(call, &phase)) return;
  const WorkspaceLayout& layout = call.seat.layout;
  const std::size_t packs = packs_in<T>(call.count);
  const std::size_t slot = layout.data(phase.buffer(), call.seat.rank);
  for_packs(packs, [&](std::size_t i) {
    move_packs<T>(
        call, [&](std::uint32_t r) { return load_pack(input_of<T>(call, r), i); },
        [&](std::uint32_t r, const Pack<T>& p) { *pack_at<T>(call, r, slot, i) = p; });
  });
  if (!exchange(call, phase, 0)) return;
  sum_to_output<T>(call, phase, packs);
  finish(call, phase);
}

// Protocol "signal": a 64-bit counter per (rank, index), only ever added to; each rank counts
// apart, in its own memory, how many it has waited for, so both kernels can be replayed.
//   writer    put_signal: adds, release, system scope; covers all that its stream did before
//   reader    wait_signal: until counter >= consumed + n, acquire, system scope; then consumed += n
//   reuse     nothing is overwritten: counters grow
//   progress  a put waits for nothing, a wait only for puts
// A signal is not a collective: it neither advances the phase nor is compared between ranks.
PYPARALLEL_KERNEL put_signal(PYPARALLEL_KERNEL_ARGUMENT(Call) call) {
  Phase phase;
  if (!begin(call, &phase) || here().thread != 0) return;
  auto* counter = reinterpret_cast<std::uint64_t*>(workspace_of(call, call.peer) +
                                                   call.seat.layout.signal(call.index));
  order::add_release_system(counter, call.count);
}

PYPARALLEL_KERNEL wait_signal(PYPARALLEL_KERNEL_ARGUMENT(Call) call) {
  Phase phase;
  if (!begin(call, &phase) || here().thread != 0) return;
  char* own = workspace_of(call, call.seat.rank);
  const auto* counter =
      reinterpret_cast<const std::uint64_t*>(own + call.seat.layout.signal(call.index));
  auto* consumed = reinterpret_cast<std::uint64_t*>(own + call.seat.layout.consumed(call.index));
  const std::uint64_t expected = *consumed + call.count;
  const auto me = static_cast<std::uint32_t>(call.seat.rank);
  for (unsigned polls = 1;; ++polls) {
    const std::uint64_t seen = order::load_acquire_system(counter);
    if (static_cast<std::int64_t>(seen - expected) >= 0) break;
    if (give_up(call, phase, polls, 0, me, expected, seen)) return;
    pause_polling(polls);
  }
  *consumed = expected;
}

using Kernel = decltype(&barrier);

inline Kernel by_dtype(DType dtype, Kernel f32, Kernel f16, Kernel bf16) {
  return dtype == DType::f32 ? f32 : dtype == DType::f16 ? f16 : bf16;
}

// The kernel of an op on elements of a type (one that request_misfit allows); null for no op.
inline Kernel kernel_of(Op op, DType dtype) {
  switch (op) {
    case Op::barrier:
      return barrier;
    case Op::all_reduce_one_shot:
      return by_dtype(dtype, all_reduce_one_shot<float>, all_reduce_one_shot<Half>,
                      all_reduce_one_shot<BFloat16>);
    case Op::all_reduce_two_shot:
      return by_dtype(dtype, all_reduce_two_shot<float>, all_reduce_two_shot<Half>,
                      all_reduce_two_shot<BFloat16>);
    case Op::all_reduce_multimem:
      return by_dtype(dtype, all_reduce_multimem<float>, all_reduce_multimem<Half>,
                      all_reduce_multimem<BFloat16>);
    case Op::all_gather:
      return by_dtype(dtype, all_gather<float>, all_gather<Half>, all_gather<Half>);
    case Op::reduce_scatter:
      return by_dtype(dtype, reduce_scatter<float>, reduce_scatter<Half>, reduce_scatter<BFloat16>);
    case Op::put_signal:
      return put_signal;
    case Op::wait_signal:
      return wait_signal;
    default:
      return nullptr;
  }
}

}  // namespace pyparallel::cuda
