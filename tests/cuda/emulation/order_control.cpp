// One all-gather and one all-reduce, again and again. Built with an order weakened (-D...=relaxed),
// ThreadSanitizer must object, though every result is right; built as it is, it must not.
#include <cstdio>
#include <vector>

#include "emulated_world.h"

int main() {
  using namespace pyparallel::cuda;
  using namespace pyparallel::cuda::emulation;
  World world({3, 2, 1, 256});
  std::atomic<bool> right{true};
  world.on_all_ranks([&](int r) {
    std::vector<float> in(40), gathered(120), sum(40);
    for (int round = 0; round < 10; ++round) {
      for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(r * 100 + round + i);
      Request request;
      request.in = in.data();
      request.count = in.size();
      request.grid = {2, 3};
      request.op = Op::all_gather;
      request.out = gathered.data();
      world.call(r, request);
      request.op = Op::all_reduce_two_shot;
      request.out = sum.data();
      world.call(r, request);
      for (std::size_t i = 0; i < in.size(); ++i) {
        float expected = 0;
        for (int peer = 0; peer < 3; ++peer) {
          const float value = static_cast<float>(peer * 100 + round + i);
          if (!(gathered[peer * in.size() + i] == value)) right = false;
          expected += value;
        }
        if (!(sum[i] == expected)) right = false;
      }
    }
  });
  std::puts(right ? "results right" : "results wrong");
  return right ? 0 : 1;
}
