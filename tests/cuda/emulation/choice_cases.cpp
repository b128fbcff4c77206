// The choice is a pure function with reasons: every size has an answer, small messages take one
// shot, large ones two, and what is excluded says why.
#include "base/error.h"
#include "check.h"
#include "cuda/choice.h"

namespace pyparallel::cuda::emulation {
namespace {

Problem all_reduce_of(std::uint64_t bytes, std::uint32_t world) {
  Problem p;
  p.count = bytes / 4;
  p.layout.world = world;
  p.nccl = false;
  return p;
}

void one_shot_then_two_shot() {
  for (std::uint32_t world : {2u, 3u, 4u, 8u, 16u}) {
    int changes = 0;
    Op last = Op::all_reduce_one_shot;
    for (std::uint64_t bytes = 4; bytes <= 64 << 20; bytes *= 2) {
      const Choice c = choose(all_reduce_of(bytes, world));
      CHECK(!c.candidate.nccl && c.candidate.predicted_us > 0, c.reason);
      if (c.candidate.op != last) ++changes;
      last = c.candidate.op;
    }
    CHECK(changes <= 1, changes, " changes of algorithm on ", world, " ranks");
    if (world > 2) CHECK(last == Op::all_reduce_two_shot && changes == 1, world);
  }
}

void multimem_needs_a_switch_and_a_caller_who_allows_its_order() {
  Problem p = all_reduce_of(1 << 20, 8);
  CHECK(candidates(p)[2].excluded.find("no multicast address") != std::string::npos);
  p.multicast = true;
  CHECK(candidates(p)[2].excluded.find("rank order") != std::string::npos);
  CHECK(choose(p).reason.find("out: all_reduce (multimem)") != std::string::npos, choose(p).reason);
  p.rank_order = false;
  CHECK(choose(p).candidate.op == Op::all_reduce_multimem, choose(p).reason);
}

void nccl_takes_the_large_ones_where_it_is() {
  Problem p = all_reduce_of(1 << 30, 8);
  p.nccl = true;
  CHECK(choose(p).candidate.nccl, choose(p).reason);
  p.count = 256;
  CHECK(!choose(p).candidate.nccl, choose(p).reason);
  p.dtype = DType::i32;
  CHECK(choose(p).candidate.nccl, choose(p).reason);
  p.nccl = false;
  try {
    choose(p);
    CHECK(false, "something was chosen for int32");
  } catch (const Unsupported& e) {
    for (const char* part :
         {"no kernel for int32", "no NCCL communicator", "256 int32 elements on 8"}) {
      CHECK(std::string(e.what()).find(part) != std::string::npos, part, " in ", e.what());
    }
  }
}

// Whatever the problem, the grid is one that the request check accepts, and more data never means
// fewer blocks.
void grids_fit() {
  for (std::uint32_t world : {1u, 2u, 3u, 8u}) {
    for (Op op :
         {Op::all_reduce_one_shot, Op::all_reduce_two_shot, Op::all_gather, Op::reduce_scatter}) {
      int blocks = 0;
      for (std::uint64_t count = 0; count < 1ull << 34; count = count * 3 + 1) {
        Problem p = all_reduce_of(4 * count, world);
        p.layout.max_blocks = 24;
        const Grid grid = grid_for(p, op);
        CHECK(grid.blocks >= 1 && grid.blocks <= 24 && grid.blocks >= blocks, grid.blocks);
        CHECK(grid.threads == 512);
        blocks = grid.blocks;
      }
      CHECK(blocks == 24 || world == 1 || op == Op::all_reduce_two_shot, blocks);
    }
  }
}

void traffic_is_counted() {
  const Problem p = all_reduce_of(4096, 4);
  CHECK(bytes_sent(p, Op::all_reduce_one_shot) == 3 * 4096);
  CHECK(bytes_sent(p, Op::all_reduce_two_shot) == 1.5 * 4096);
  CHECK(bytes_sent(p, Op::all_gather) == 3 * 4096);
  CHECK(bytes_sent(all_reduce_of(4096, 1), Op::all_reduce_multimem) == 0);
}

}  // namespace

void add_choice_cases(Cases& cases) {
  cases["one_shot_then_two_shot"] = one_shot_then_two_shot;
  cases["multimem_needs_a_switch"] = multimem_needs_a_switch_and_a_caller_who_allows_its_order;
  cases["nccl_takes_the_large_ones"] = nccl_takes_the_large_ones_where_it_is;
  cases["grids_fit"] = grids_fit;
  cases["traffic_is_counted"] = traffic_is_counted;
}

}  // namespace pyparallel::cuda::emulation
