// Speed of csrc/shm/reduce against memcpy, one thread.
//   g++ -std=gnu++17 -O2 -Icsrc bench/native/reduce_speed.cpp -o /tmp/reduce_speed \
//       -Lpyparallel/lib -lpyparallel -Wl,-rpath,$PWD/pyparallel/lib && /tmp/reduce_speed
// Method: each row is one size; its contestants run in turn (so that a change of clock or a
// neighbour meets all alike), 31 rounds, each long enough to dwarf the clock; the median of GB/s
// counts bytes read plus bytes written, without reads for ownership. p10 and p90 show the spread.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "shm/reduce.h"

using namespace pyparallel;
using namespace pyparallel::shm;

namespace {

struct Contestant {
  std::string name;
  std::size_t bytes;  // moved per call
  std::function<void()> call;
  std::vector<double> speeds;
};

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void race(const char* title, std::size_t array_bytes, std::vector<Contestant> all) {
  for (auto& one : all) one.call();
  for (int round = 0; round < 31; ++round) {
    for (auto& one : all) {
      const int calls = static_cast<int>(std::max<std::size_t>(1, (4 << 20) / one.bytes));
      const double start = seconds();
      for (int i = 0; i < calls; ++i) one.call();
      one.speeds.push_back(static_cast<double>(one.bytes) * calls / (seconds() - start) / 1e9);
    }
  }
  std::printf("%s, arrays of %zu KiB\n", title, array_bytes >> 10);
  for (auto& one : all) {
    std::sort(one.speeds.begin(), one.speeds.end());
    std::printf("  %-28s %7.2f GB/s  (%.2f .. %.2f)\n", one.name.c_str(), one.speeds[15],
                one.speeds[3], one.speeds[27]);
  }
}

}  // namespace

int main() {
  std::printf("reduce: %s\n", simd_name());
  const std::size_t most = std::size_t{64} << 20;
  constexpr int arrays = 17;
  std::vector<char*> memory;
  for (int k = 0; k < arrays; ++k) {
    memory.push_back(static_cast<char*>(std::aligned_alloc(4096, most)));
    for (std::size_t i = 0; i < most / 4; ++i) {
      const float x = 1.0f + static_cast<float>(i % 1000) / 1024;
      std::memcpy(memory[k] + 4 * i, &x, 4);
    }
  }
  for (std::size_t bytes :
       {std::size_t{4} << 10, std::size_t{128} << 10, std::size_t{1} << 20, most}) {
    const auto sum = [&](const char* name, int n, DType dtype, Store store, ReduceOp op) {
      return Contestant{name,
                        bytes * (n + 1),
                        [=, &memory] {
                          ReduceArgs args;
                          args.inputs = reinterpret_cast<const void* const*>(memory.data() + 1);
                          args.n = n;
                          args.out = memory[0];
                          args.count = bytes / size_of(dtype);
                          args.dtype = dtype;
                          args.op = op;
                          args.store = store;
                          args.divisor = n;
                          reduce(args);
                        },
                        {}};
    };
    const auto copying = [&](const char* name, auto how) {
      return Contestant{name, bytes * 2, [=, &memory] { how(memory[0], memory[1], bytes); }, {}};
    };
    const auto cached = Store::cached, streamed = Store::streamed;
    race("copy", bytes,
         {copying("memcpy", [](void* o, const void* i, std::size_t n) { std::memcpy(o, i, n); }),
          copying("rep movsb",
                  [](void* o, const void* i, std::size_t n) {
#if defined(__x86_64__)
                    asm volatile("rep movsb" : "+D"(o), "+S"(i), "+c"(n)::"memory");
#else
                    std::memcpy(o, i, n);
#endif
                  }),
          copying("copy cached",
                  [](void* o, const void* i, std::size_t n) { copy(o, i, n, Store::cached); }),
          copying("copy streamed",
                  [](void* o, const void* i, std::size_t n) { copy(o, i, n, Store::streamed); }),
          sum("float32 sum 2 cached", 2, DType::f32, cached, ReduceOp::sum),
          sum("float32 sum 2 streamed", 2, DType::f32, streamed, ReduceOp::sum),
          sum("float32 max 2 cached", 2, DType::f32, cached, ReduceOp::max),
          sum("float64 sum 2 cached", 2, DType::f64, cached, ReduceOp::sum),
          sum("float16 sum 2 cached", 2, DType::f16, cached, ReduceOp::sum),
          sum("bfloat16 sum 2 cached", 2, DType::bf16, cached, ReduceOp::sum),
          sum("bfloat16 sum 2 streamed", 2, DType::bf16, streamed, ReduceOp::sum),
          sum("int8 sum 2 cached", 2, DType::i8, cached, ReduceOp::sum),
          sum("int8 avg 2 cached", 2, DType::i8, cached, ReduceOp::avg),
          sum("int64 product 2 cached", 2, DType::i64, cached, ReduceOp::product),
          sum("float32 sum 3 cached", 3, DType::f32, cached, ReduceOp::sum),
          sum("float32 sum 4 cached", 4, DType::f32, cached, ReduceOp::sum),
          sum("float32 sum 8 cached", 8, DType::f32, cached, ReduceOp::sum),
          sum("float32 sum 16 cached", 16, DType::f32, cached, ReduceOp::sum),
          sum("bfloat16 sum 8 cached", 8, DType::bf16, cached, ReduceOp::sum)});
  }
  for (char* p : memory) std::free(p);
}
