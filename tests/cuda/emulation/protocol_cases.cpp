// Rounds and signals: replay, the wrap of the call number, groups side by side, barriers, choice of
// misfit. What a captured graph, a second stream and a long-running job do to the protocol.
#include <chrono>

#include "arrays.h"
#include "base/error.h"
#include "emulated_world.h"

namespace pyparallel::cuda::emulation {
namespace {

Request sum_request(Op op, const std::vector<float>& in, std::vector<float>& out, int blocks = 2) {
  Request request;
  request.op = op;
  request.in = in.data();
  request.out = out.data();
  request.count = in.size();
  request.grid = {blocks, 4};
  return request;
}

// in[i] of rank r in round `round`: small integers, so that sums are exact.
void fill(std::vector<float>& in, int rank, int round) {
  for (std::size_t i = 0; i < in.size(); ++i) {
    in[i] = static_cast<float>((i * 7 + rank * 31 + round * 13) % 101);
  }
}
void check_sum(const std::vector<float>& out, int world, int round) {
  std::vector<float> in(out.size());
  std::vector<float> expected(out.size(), 0.0f);
  for (int r = 0; r < world; ++r) {
    fill(in, r, round);
    for (std::size_t i = 0; i < in.size(); ++i) expected[i] += in[i];
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    CHECK(out[i] == expected[i], "element ", i, ", round ", round, ": ", out[i], " for ",
          expected[i]);
  }
}

// A launch recorded once is replayed between eager calls; an odd number of calls per replay, so
// that the recorded launches meet both buffers. Anything counted by the host would be stale.
void recorded_launches_are_replayed() {
  World world({3, 3, 2, 256});
  world.on_all_ranks([&](int r) {
    std::vector<float> in(150), out(150), eager_in(40), eager_out(40);
    const std::vector<Recorded> graph =
        record(sum_request(Op::all_reduce_two_shot, in, out), world.seat(r));
    CHECK(graph.size() == 1, graph.size());
    for (int round = 0; round < 12; ++round) {
      fill(in, r, round);
      for (const Recorded& launch : graph) run(launch);
      check_sum(out, world.size(), round);
      if (round % 3 == 2) {
        fill(eager_in, r, round);
        world.call(r, sum_request(Op::all_reduce_one_shot, eager_in, eager_out, 1 + round % 3));
        check_sum(eager_out, world.size(), round);
      }
    }
  });
}

// The call number is 32 bits wide: begin just before its wrap, with the flags as they would be.
void the_call_number_wraps() {
  World world({3, 2, 2, 256});
  const std::uint32_t before = 0xfffffffc;
  for (int r = 0; r < world.size(); ++r) {
    const WorkspaceLayout& l = world.layout();
    reinterpret_cast<Control*>(world.memory(r) + l.control())->phase = before;
    for (std::uint32_t round = 0; round < kRounds; ++round) {
      for (std::uint32_t block = 0; block < l.max_blocks; ++block) {
        for (std::uint32_t source = 0; source < l.world; ++source) {
          *reinterpret_cast<std::uint64_t*>(world.memory(r) + l.flag(round, block, source)) =
              std::uint64_t{before} << 32;
        }
      }
    }
  }
  world.on_all_ranks([&](int r) {
    std::vector<float> in(60), out(60);
    for (int round = 0; round < 9; ++round) {
      fill(in, r, round);
      world.call(
          r, sum_request(round % 2 ? Op::all_reduce_one_shot : Op::all_reduce_two_shot, in, out));
      check_sum(out, world.size(), round);
    }
  });
  const auto* control = reinterpret_cast<Control*>(world.memory(0) + world.layout().control());
  CHECK(control->phase == before + 9, control->phase);
  CHECK(control->ticket == 0 && control->failed == 0);
}

// What one rank wrote before a barrier, all see after it.
void barrier_orders_memory() {
  World world({4, 2, 2, 128});
  std::vector<int> written(world.size() * 16, -1);
  world.on_all_ranks([&](int r) {
    Request meet_all;
    meet_all.grid = {1, 3};
    for (int round = 0; round < 8; ++round) {
      written[r * 16] = round;
      world.call(r, meet_all);
      for (int peer = 0; peer < world.size(); ++peer) CHECK(written[peer * 16] == round, peer);
      world.call(r, meet_all);
    }
  });
}

// Two groups of the same ranks, each with its workspace and stream, their launches in another order
// on each rank: one group's calls never wait for the other's.
void groups_do_not_interfere() {
  World first({3, 2, 2, 256}), second({3, 2, 2, 256});
  const auto stream = [](World& world, int r, int salt) {
    std::vector<float> in(100), out(100);
    for (int round = 0; round < 6; ++round) {
      fill(in, r, round + salt);
      world.call(r, sum_request(Op::all_reduce_two_shot, in, out));
      check_sum(out, world.size(), round + salt);
    }
  };
  first.on_all_ranks(
      [&](int r) { at_once({[&] { stream(first, r, 0); }, [&] { stream(second, r, 50); }}); });
}

// Groups {0, 1} and {1, 2}: rank 1 is rank 1 of the one and rank 0 of the other, on one stream.
void overlapping_groups() {
  World low({2, 2, 2, 256}), high({2, 2, 2, 256});
  const auto member = [](World& world, int r, int round) {
    std::vector<float> in(90), out(90);
    fill(in, r, round);
    world.call(r, sum_request(Op::all_reduce_one_shot, in, out));
    check_sum(out, 2, round);
  };
  const auto rounds = [](auto&& body) {
    return [body] {
      for (int round = 0; round < 6; ++round) body(round);
    };
  };
  at_once({rounds([&](int round) { member(low, 0, round); }), rounds([&](int round) {
             member(low, 1, round);
             member(high, 0, round);
           }),
           rounds([&](int round) { member(high, 1, round); })});
}

// A ring of data with signals: what was stored before the put is there after the wait; replayed.
void signals_carry_data() {
  World world({3, 1, 4, 128});
  std::vector<std::vector<int>> box(world.size(), std::vector<int>(64, -1));
  world.on_all_ranks([&](int r) {
    const int next = (r + 1) % world.size(), previous = (r + world.size() - 1) % world.size();
    const auto signal = [&](Op op, std::uint32_t index, int peer) {
      Request request;
      request.op = op;
      request.index = index;
      request.peer = peer;
      request.count = 1;
      return record(request, world.seat(r)).front();
    };
    const Recorded put_full = signal(Op::put_signal, 1, next);
    const Recorded wait_full = signal(Op::wait_signal, 1, r);
    const Recorded put_empty = signal(Op::put_signal, 3, previous);
    const Recorded wait_empty = signal(Op::wait_signal, 3, r);
    for (int round = 0; round < 10; ++round) {
      for (int& value : box[next]) value = r * 1000 + round;
      run(put_full);
      run(wait_full);
      for (int value : box[r]) CHECK(value == previous * 1000 + round, value);
      run(put_empty);
      run(wait_empty);
    }
  });
}

// No two things of a layout overlap, flags have a line each, and a peer's first flag is found
// whatever the rest of the layout is.
void layouts_are_disjoint() {
  for (const WorkspaceLayout l : {WorkspaceLayout{1, 1, 0, 128}, WorkspaceLayout{3, 5, 4, 384},
                                  WorkspaceLayout{8, 32, 7, 1 << 20}}) {
    std::map<std::size_t, std::size_t> parts;  // offset -> bytes
    std::size_t total = 0;
    const auto add = [&](std::size_t offset, std::size_t bytes) {
      CHECK(offset % kLine == 0, offset);
      CHECK(parts.emplace(offset, bytes).second, "offset ", offset, " twice");
      total += bytes;
    };
    add(l.control(), kLine);
    for (std::uint32_t s = 0; s < l.world; ++s) {
      for (std::uint32_t buffer = 0; buffer < 2; ++buffer) {
        add(l.data(buffer, s), l.slot_bytes);
        add(l.result(buffer, s), l.slot_bytes);
      }
      for (std::uint32_t round = 0; round < kRounds; ++round) {
        for (std::uint32_t b = 0; b < l.max_blocks; ++b) add(l.flag(round, b, s), kLine);
      }
      CHECK(l.flag(0, 0, s) == kLine + s * kLine, s);
    }
    for (std::uint32_t i = 0; i < l.signals; ++i) {
      add(l.signal(i), kLine);
      add(l.consumed(i), kLine);
    }
    CHECK(total == l.bytes(), total, " of ", l.bytes());
    std::size_t end = 0;
    for (const auto& [offset, bytes] : parts) {
      CHECK(offset == end, "hole or overlap at ", offset);
      end = offset + bytes;
    }
  }
}

void misfits_are_refused() {
  World world({2, 3, 2, 256});
  std::vector<float> in(64), out(64);
  const auto refused = [&](const std::string& words, auto&& change) {
    Request request = sum_request(Op::all_reduce_one_shot, in, out);
    Seat seat = world.seat(1);
    change(request, seat);
    const std::string why = request_misfit(request, seat);
    CHECK(why.find(words) != std::string::npos, "\"", words, "\" in \"", why, "\"");
  };
  refused("", [](Request&, Seat&) {});
  refused("grid of 4 blocks", [](Request& r, Seat&) { r.grid.blocks = 4; });
  refused("blocks of 0 threads", [](Request& r, Seat&) { r.grid.threads = 0; });
  refused("int32 elements", [](Request& r, Seat&) { r.dtype = DType::i32; });
  refused("output address", [](Request& r, Seat&) { r.out = static_cast<char*>(r.out) + 2; });
  refused("input address 0", [](Request& r, Seat&) { r.in = nullptr; });
  refused("overlap", [](Request& r, Seat&) { r.in = static_cast<float*>(r.out) + 1; });
  refused("overlap", [&](Request& r, Seat&) {
    r.op = Op::all_gather;
    r.count = 32;
    r.in = r.out;  // rank 1's place is 32 elements further
  });
  refused("exceed the address space", [](Request& r, Seat&) { r.count = 1ull << 61; });
  refused("no multicast address", [](Request& r, Seat& s) {
    r.op = Op::all_reduce_multimem;
    s.multicast = nullptr;
  });
  refused("no such rank", [](Request&, Seat& s) { s.rank = 2; });
  refused("workspace address of rank 0", [](Request&, Seat& s) { s.peers[0] = nullptr; });
  refused("no status page", [](Request&, Seat& s) { s.status = nullptr; });
  refused("timeout of 0", [](Request& r, Seat&) { r.timeout_ns = 0; });
  refused("73 ranks", [](Request&, Seat& s) { s.layout.world = kMaxWorld + 1; });
  refused("slots of 130 bytes", [](Request&, Seat& s) { s.layout.slot_bytes = 130; });
  refused("signal 2 of a workspace with 2", [](Request& r, Seat&) {
    r.op = Op::put_signal;
    r.index = 2;
  });
  refused("no rank -1", [](Request& r, Seat&) {
    r.op = Op::put_signal;
    r.peer = -1;
  });
  // Sizes beyond 2^31 elements and 2^32 bytes are cut into launches without wrapping.
  Seat seat = world.seat(0);
  seat.layout.slot_bytes = 1ull << 33;
  Request request;
  request.op = Op::all_reduce_two_shot;
  request.count = 3'000'000'000;
  request.in = in.data();
  request.out = reinterpret_cast<void*>(std::uintptr_t{1} << 46);
  CHECK(request_misfit(request, seat).empty(), request_misfit(request, seat));
  const std::vector<Recorded> launches = record(request, seat);
  CHECK(launches.size() == 1 && launches[0].call.count == request.count, launches.size());
  request.op = Op::all_gather;
  const std::vector<Recorded> pieces = record(request, seat);
  CHECK(pieces.size() == 2 && pieces[1].call.count == request.count - (1ull << 31), pieces.size());
  CHECK(static_cast<const char*>(pieces[1].call.in) - static_cast<const char*>(request.in) ==
        1ll << 33);
  CHECK(seat.layout.bytes() > (1ull << 36), seat.layout.bytes());
}

}  // namespace

void add_protocol_cases(Cases& cases) {
  cases["recorded_launches_are_replayed"] = recorded_launches_are_replayed;
  cases["the_call_number_wraps"] = the_call_number_wraps;
  cases["barrier_orders_memory"] = barrier_orders_memory;
  cases["groups_do_not_interfere"] = groups_do_not_interfere;
  cases["overlapping_groups"] = overlapping_groups;
  cases["signals_carry_data"] = signals_carry_data;
  cases["layouts_are_disjoint"] = layouts_are_disjoint;
  cases["misfits_are_refused"] = misfits_are_refused;
}

}  // namespace pyparallel::cuda::emulation
