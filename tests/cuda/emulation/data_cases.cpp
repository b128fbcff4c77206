// Every op x dtype x world size x size x alignment x in place or not: right values, right bits, the
// same on all ranks, nothing written outside. Sizes go over the pack, the slot and the chunk.
#include <optional>

#include "arrays.h"
#include "base/error.h"
#include "emulated_world.h"

namespace pyparallel::cuda::emulation {
namespace {

bool is_all_reduce(Op op) {
  return op == Op::all_reduce_one_shot || op == Op::all_reduce_two_shot ||
         op == Op::all_reduce_multimem;
}

// The arrays of one rank in one call.
template <typename T>
struct Arrays {
  std::optional<Guarded<T>> in, out;  // no `in`: in place
  T* in_data = nullptr;
  T* out_data = nullptr;

  Arrays(Op op, std::size_t count, int world, int rank, bool in_place, std::minstd_rand& random) {
    const std::size_t in_count = op == Op::reduce_scatter ? count * world : count;
    const std::size_t out_count = op == Op::all_gather ? count * world : count;
    const int shift = static_cast<int>(random() % 4 == 0 ? random() % 8 : 0);
    if (!in_place) {
      in.emplace(in_count, shift, random);
      out.emplace(out_count, random() % 4 == 0 ? 3 : 0, random);
      in->fill_normal(random);
      in_data = in->data();
      out_data = out->data();
      return;
    }
    out.emplace(std::max(in_count, out_count), shift, random);
    out->fill_normal(random);
    in_data = out->data() + (op == Op::all_gather ? rank * count : 0);
    out_data = out->data() + (op == Op::reduce_scatter ? rank * count : 0);
  }
};

template <typename T>
void check_call(World& world, Op op, std::size_t count, Grid grid, bool in_place,
                std::minstd_rand& random, Blocks blocks = Blocks::together) {
  const int n = world.size();
  std::vector<Arrays<T>> arrays;
  arrays.reserve(n);
  std::vector<std::vector<T>> inputs;
  for (int r = 0; r < n; ++r) {
    arrays.emplace_back(op, count, n, r, in_place, random);
    const std::size_t in_count = op == Op::reduce_scatter ? count * n : count;
    inputs.emplace_back(arrays[r].in_data, arrays[r].in_data + in_count);
  }
  world.on_all_ranks([&](int r) {
    Request request;
    request.op = op;
    request.dtype = dtype_of<T>();
    request.in = arrays[r].in_data;
    request.out = arrays[r].out_data;
    request.count = count;
    request.grid = grid;
    world.call(r, request, blocks);
  });
  for (int r = 0; r < n; ++r) {
    const auto where = [&](std::size_t i) {
      return str(name_of(op), " ", name_of(dtype_of<T>()), " x ", count, ", rank ", r, " of ", n,
                 in_place ? ", in place" : "", ", element ", i);
    };
    CHECK(world.page(r).state == StatusPage::ok, where(0));
    arrays[r].out->check_guards();
    if (arrays[r].in) arrays[r].in->check_guards();
    const T* out = arrays[r].out_data;
    if (op == Op::all_gather) {
      for (std::size_t i = 0; i < count * n; ++i) {
        CHECK(same_bits(out[i], inputs[i / count][i % count]), where(i));
      }
      continue;
    }
    for (std::size_t i = 0; i < count; ++i) {
      const Sum<T> sum = sum_over_ranks(inputs, op == Op::reduce_scatter ? r * count + i : i);
      const double off = std::fabs(to_float(out[i]) - sum.exact);
      CHECK(off <= sum.bound, where(i), ": off by ", off, ", allowed ", sum.bound);
      if (op != Op::all_reduce_multimem) CHECK(same_bits(out[i], sum.rounded), where(i));
      if (is_all_reduce(op)) CHECK(same_bits(out[i], arrays[0].out_data[i]), where(i));
    }
  }
}

template <typename T>
void check_sizes(World& world, Op op, std::minstd_rand& random) {
  // One slot holds 256 bytes: the larger counts take several launches.
  const std::size_t slot = world.layout().slot_bytes / sizeof(T);
  const std::size_t counts[] = {
      0, 1, 7, Pack<T>::size, Pack<T>::size + 1, slot, slot + 1, 2 * slot - 3, 3 * slot + 5};
  for (std::size_t count : counts) {
    const Grid grid{1 + static_cast<int>(random() % 3), 4};
    check_call<T>(world, op, count, grid, random() % 2 == 0, random);
  }
}

void check_op(Op op) {
  std::minstd_rand random(7 + static_cast<unsigned>(op));
  for (std::uint32_t n : {1u, 2u, 3u, 4u}) {
    World world({n, 3, 2, 256});
    check_sizes<float>(world, op, random);
    check_sizes<Half>(world, op, random);
    check_sizes<BFloat16>(world, op, random);
  }
}

constexpr Op kCollectives[] = {Op::all_reduce_one_shot, Op::all_reduce_two_shot,
                               Op::all_reduce_multimem, Op::all_gather, Op::reduce_scatter};

// Many calls of all kinds on one workspace, ranks out of step, both buffers and all flags in use.
void many_phases() {
  std::minstd_rand random(99);
  World world({3, 4, 2, 384});
  for (int call = 0; call < 60; ++call) {
    const Op op = kCollectives[random() % 5];
    const Grid grid{1 + static_cast<int>(random() % 4), 1 + static_cast<int>(random() % 6)};
    check_call<BFloat16>(world, op, random() % 500, grid, random() % 2, random);
  }
}

// More ranks than threads in a block, and a world of eight.
void eight_ranks() {
  std::minstd_rand random(3);
  World world({8, 2, 2, 128});
  for (Op op : kCollectives) check_call<Half>(world, op, 203, {2, 2}, false, random);
}

// No block may need a later one of its own grid to run.
void blocks_one_after_another() {
  std::minstd_rand random(5);
  World world({3, 4, 2, 256});
  for (Op op : kCollectives) {
    check_call<float>(world, op, 301, {4, 4}, false, random, Blocks::one_after_another);
  }
}

}  // namespace

void add_data_cases(Cases& cases) {
  cases["all_reduce_one_shot"] = [] { check_op(Op::all_reduce_one_shot); };
  cases["all_reduce_two_shot"] = [] { check_op(Op::all_reduce_two_shot); };
  cases["all_reduce_multimem"] = [] { check_op(Op::all_reduce_multimem); };
  cases["all_gather"] = [] { check_op(Op::all_gather); };
  cases["reduce_scatter"] = [] { check_op(Op::reduce_scatter); };
  cases["many_phases"] = many_phases;
  cases["eight_ranks"] = eight_ranks;
  cases["blocks_one_after_another"] = blocks_one_after_another;
}

}  // namespace pyparallel::cuda::emulation
