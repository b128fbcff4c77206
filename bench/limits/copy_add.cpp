// The limit to approach: a sum over ranks by nothing but copies and additions in shared memory.
//
// No checks, no waiting but spinning (with a yield for a busy machine), no other types, called from
// C in a loop: what is left is what memory and the cache lines between the cores allow. There are
// four ways (whole chunks or shares of them, through the caches or streamed past them), and the
// fastest one for a size is found by trying. Built by bench/providers/limit.py; not a part of the
// library.
//
// Protocol: rank r writes a chunk, or what others need of it, to its slot and raises its flag to
// the number of the step (release); waits for all flags (acquire); reads the slots. Two slots in
// turn, and every step waits for all, so nobody writes a slot that someone may still read.
#include <emmintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr std::size_t kChunk = 131072;  // floats
constexpr int kWays = 4;

struct alignas(64) Flag {
  std::atomic<std::uint64_t> value;
};

// Spins; past what a wait takes when every rank has its core, lets others have this one.
void wait_for(const Flag& flag, std::uint64_t step) {
  for (int spins = 0; flag.value.load(std::memory_order_acquire) < step; ++spins) {
    if (spins < 20000) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }
}

// `out` is cache-line aligned. Streamed: complete before the next release, by the fence.
template <bool streamed, typename Value>
void write(float* out, std::size_t n, const Value& value) {
  std::size_t i = 0;
  if (streamed) {
    for (; i + 4 <= n; i += 4) _mm_stream_ps(out + i, value(i));
    _mm_sfence();
  } else {
    for (; i + 4 <= n; i += 4) _mm_storeu_ps(out + i, value(i));
  }
  for (; i < n; ++i) _mm_store_ss(out + i, value(i));
}

struct Limit {
  Flag* flags;
  float* slots;
  int rank, world;
  std::uint64_t step = 0, chunk = 0;

  float* slot(int r) const {
    return slots + (static_cast<std::size_t>(r) * 2 + chunk % 2) * kChunk;
  }

  void meet() {
    flags[rank].value.store(++step, std::memory_order_release);
    for (int r = 0; r < world; ++r) wait_for(flags[r], step);
  }

  // Sum in rank order of every rank's part that begins at `from` in its slot; mine is in `mine`.
  auto sum(const float* mine, std::size_t from) const {
    return [this, mine, from](std::size_t i) {
      auto part = [&](int r) { return _mm_loadu_ps(r == rank ? mine + i : slot(r) + from + i); };
      __m128 total = part(0);
      for (int r = 1; r < world; ++r) total = _mm_add_ps(total, part(r));
      return total;
    };
  }

  template <bool streamed>
  void whole(float* data, std::size_t n) {
    write<streamed>(slot(rank), n, [&](std::size_t i) { return _mm_loadu_ps(data + i); });
    meet();
    write<false>(data, n, sum(data, 0));
  }

  // Each rank sums its share and the others copy it: less to add from two ranks on.
  template <bool streamed>
  void shares(float* data, std::size_t n) {
    const std::size_t share = (n / world + 15) / 16 * 16;  // whole lines
    auto begin = [&](int r) { return std::min(n, share * r); };
    auto size = [&](int r) { return begin(r + 1) - begin(r); };
    for (int r = 0; r < world; ++r) {
      const float* from = data + begin(r);
      if (r == rank) continue;
      write<streamed>(slot(rank) + begin(r), size(r),
                      [&](std::size_t i) { return _mm_loadu_ps(from + i); });
    }
    meet();
    float* mine = data + begin(rank);
    write<false>(mine, size(rank), sum(mine, begin(rank)));
    write<streamed>(slot(rank) + begin(rank), size(rank),
                    [&](std::size_t i) { return _mm_loadu_ps(mine + i); });
    meet();
    for (int r = 0; r < world; ++r) {
      if (r != rank) std::memcpy(data + begin(r), slot(r) + begin(r), size(r) * sizeof(float));
    }
  }

  void all_reduce(int way, float* data, std::size_t count) {
    for (std::size_t begin = 0; begin < count; begin += kChunk, ++chunk) {
      const std::size_t n = std::min(kChunk, count - begin);
      if (way == 0) whole<false>(data + begin, n);
      if (way == 1) whole<true>(data + begin, n);
      if (way == 2) shares<false>(data + begin, n);
      if (way == 3) shares<true>(data + begin, n);
    }
  }
};

}  // namespace

extern "C" {

std::size_t limit_bytes(int world) {
  return sizeof(Flag) * (world + 1) + world * 2 * kChunk * sizeof(float);
}

// `memory`: limit_bytes(world) zero bytes, cache-line aligned, shared by all ranks.
void* limit_create(void* memory, int rank, int world) {
  auto* flags = static_cast<Flag*>(memory);
  return new Limit{flags, reinterpret_cast<float*>(flags + world + 1), rank, world};
}

void limit_destroy(void* limit) { delete static_cast<Limit*>(limit); }

// The fastest way for this size, by rank 0's clock; the same on all ranks. Overwrites `data`.
int limit_choose(void* opaque, float* data, std::size_t count) {
  auto& limit = *static_cast<Limit*>(opaque);
  std::atomic<std::uint64_t>& choice = limit.flags[limit.world].value;
  const std::size_t tries = std::max<std::size_t>(4, 200000 / (count + 1));
  double best = 1e300;
  for (int round = 0; round < 3; ++round) {
    for (int way = 0; way < kWays; ++way) {
      std::fill(data, data + count, 1.0f);
      limit.meet();
      const auto begun = std::chrono::steady_clock::now();
      for (std::size_t i = 0; i < tries; ++i) limit.all_reduce(way, data, count);
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begun;
      if (limit.rank == 0 && spent.count() < best) {
        best = spent.count();
        choice.store(way, std::memory_order_relaxed);
      }
    }
  }
  limit.meet();
  return static_cast<int>(choice.load(std::memory_order_relaxed));
}

// Sums in place, `calls` times over, going round `sets` arrays.
void limit_all_reduce(void* limit, int way, float** data, int sets, std::size_t count, int calls) {
  for (int call = 0; call < calls; ++call) {
    static_cast<Limit*>(limit)->all_reduce(way, data[call % sets], count);
  }
}
}
