// How the ranks of a call meet. All kernels are made of begin, exchange and finish.
//
// Protocol "rounds": flag word = call number << 32 | signature, one flag per (round, block, source)
//   writer    block b of the source, after all its stores of this round: block barrier, then one
//             thread per peer stores the word into the peer's flag, release, system scope
//   reader    block b of the receiver: one thread per peer loads its flag, acquire, system scope,
//             until the call number is this call's (or later), compares the signature; block
//             barrier; then reads. Block b reads only what blocks b wrote, so it waits for no other
//             block.
//   reuse     two buffers in turn (call number modulo 2). A rank overwrites a peer's buffer in call
//   p
//             only after its own call p - 1 ended, for which the peer's flag of p - 1 came, which
//             the peer stored after its call p - 2, the last reader of that buffer, had ended. This
//             needs that every call meets every rank (all do) and that the calls on one workspace
//             are ordered on each rank (one stream, or events).
//   progress  a push waits for nothing, round r waits for the peers' pushes of round r. No wait
//             points to a later block of the same grid, so blocks may run one after another.
// The call number is Control::phase + 1; the last block through raises it. So nothing is cleared,
// no number comes from the host, and a captured launch can be replayed. It is 32 bits wide and
// compared by signed difference.
//
// A wait that outlives its deadline, sees another signature, or finds StatusPage::abort set writes
// the status page, marks the workspace failed and ends; its block sends nothing more, and later
// launches on the workspace do nothing. Peers run into their own deadlines. The output is
// undefined.
#pragma once

#include "cuda/calls.h"
#include "cuda/memory_order.h"

namespace pyparallel::cuda {

PYPARALLEL_DEVICE char* workspace_of(const Call& call, std::uint32_t rank) {
  return static_cast<char*>(call.seat.peers[rank]);
}
PYPARALLEL_DEVICE Control* control_of(const Call& call) {
  return reinterpret_cast<Control*>(workspace_of(call, call.seat.rank) +
                                    call.seat.layout.control());
}
PYPARALLEL_DEVICE std::uint64_t* flag_of(const Call& call, std::uint32_t holder,
                                         std::uint32_t round, std::uint32_t source) {
  return reinterpret_cast<std::uint64_t*>(workspace_of(call, holder) +
                                          call.seat.layout.flag(round, here().block, source));
}

// The running call: its number, and which of the two buffers it uses.
struct Phase {
  std::uint32_t call;
  std::uint64_t started_ns;
  PYPARALLEL_DEVICE std::uint32_t buffer() const { return call % 2; }
};

// False when an earlier launch failed: then return, touching nothing. Same answer in the whole
// block.
PYPARALLEL_DEVICE bool begin(const Call& call, Phase* phase) {
  const Control* control = control_of(call);
  phase->call = order::load_relaxed_device(&control->phase) + 1;
  phase->started_ns = clock_ns();
  return !meet_any(order::load_relaxed_device(&control->failed) != 0);
}

// The last block through raises the phase. All threads of the block have read it: they met in
// begin.
PYPARALLEL_DEVICE void finish(const Call& call, const Phase& phase) {
  const Place at = here();
  if (at.thread != 0) return;
  Control* control = control_of(call);
  if (order::add_both_device(&control->ticket, 1) + 1 == at.blocks) {
    order::store_relaxed_device(&control->ticket, 0);
    order::store_relaxed_device(&control->phase, phase.call);
  }
}

// Records why this rank stopped, unless that is done already. Always false.
PYPARALLEL_DEVICE bool fail(const Call& call, const Phase& phase, StatusPage::State state,
                            std::uint32_t round, std::uint32_t peer, std::uint64_t expected,
                            std::uint64_t seen) {
  if (order::claim_device(&control_of(call)->failed)) {
    StatusPage* page = call.seat.status;
    page->op = call.op;
    page->rank = static_cast<std::uint32_t>(call.seat.rank);
    page->peer = peer;
    page->block = here().block;
    page->round = round;
    page->call = phase.call;
    page->expected = expected;
    page->seen = seen;
    page->waited_ns = clock_ns() - phase.started_ns;
    order::store_release_system(&page->state, static_cast<std::uint32_t>(state));
  }
  return false;
}

// Whether a waiter must give up at its poll number `polls`; then it has been recorded.
PYPARALLEL_DEVICE bool give_up(const Call& call, const Phase& phase, unsigned polls,
                               std::uint32_t round, std::uint32_t peer, std::uint64_t expected,
                               std::uint64_t seen) {
  // Each of these looks costs as much as a poll or more (the status page may be in host memory).
  if (polls % 8 != 0) return false;
  if (order::load_relaxed_device(&control_of(call)->failed) != 0) return true;
  if (polls % 64 != 0) return false;
  if (order::load_relaxed_system(&call.seat.status->abort) != 0) {
    return !fail(call, phase, StatusPage::aborted, round, peer, expected, seen);
  }
  if (clock_ns() - phase.started_ns > call.timeout_ns) {
    return !fail(call, phase, StatusPage::timeout, round, peer, expected, seen);
  }
  return false;
}

// Waits for the peer's word of this round.
PYPARALLEL_DEVICE bool await(const Call& call, const Phase& phase, std::uint32_t round,
                             std::uint32_t peer, std::uint64_t expected) {
  const std::uint64_t* flag = flag_of(call, call.seat.rank, round, peer);
  for (unsigned polls = 1;; ++polls) {
    const std::uint64_t seen = order::load_acquire_system(flag);
    const auto ahead =
        static_cast<std::int32_t>(static_cast<std::uint32_t>(seen >> 32) - phase.call);
    // A peer that is further on has finished this call, so it has found our signature equal to its
    // own.
    if (ahead > 0) return true;
    if (ahead == 0) {
      return seen == expected ||
             fail(call, phase, StatusPage::mismatch, round, peer, expected, seen);
    }
    if (give_up(call, phase, polls, round, peer, expected, seen)) return false;
    pause_polling(polls);
  }
}

// Publishes what this block stored in this round and waits for the peers' parts. False: stop.
PYPARALLEL_DEVICE bool exchange(const Call& call, const Phase& phase, std::uint32_t round) {
  const Place at = here();
  const std::uint32_t world = call.seat.layout.world;
  const std::uint32_t me = static_cast<std::uint32_t>(call.seat.rank);
  const std::uint64_t word = std::uint64_t{phase.call} << 32 | call.signature;
  meet();
  for (std::uint32_t peer = at.thread; peer < world; peer += at.threads) {
    if (peer != me) order::store_release_system(flag_of(call, peer, round, me), word);
  }
  bool came = true;
  for (std::uint32_t peer = at.thread; peer < world && came; peer += at.threads) {
    if (peer != me) came = await(call, phase, round, peer, word);
  }
  return !meet_any(!came);
}

}  // namespace pyparallel::cuda
