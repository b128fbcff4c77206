// The limit to approach: a sum over ranks by nothing but copies and additions in shared memory.
//
// No checks, no waiting but spinning (with a yield for a busy machine), no other types, called from
// C in a loop: what is left is what the memory and the cache lines between the cores allow for this
// algorithm. Built by bench/providers/limit.py; not a part of the library.
//
// Protocol: rank r copies a chunk of its input to its slot and raises its flag to the chunk's
// number (release); waits for all flags (acquire); adds the slots in rank order. Two slots in turn,
// and a rank is never two chunks ahead of a reader, because every chunk waits for all.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr std::size_t kChunk = 32768;  // floats: 128 KB, so that a slot stays in the L2 cache

struct alignas(64) Flag {
  std::atomic<std::uint64_t> value;
};

// Spins; past what a wait takes when every rank has its core, lets others have this one.
void wait_for(const Flag& flag, std::uint64_t chunk) {
  for (int spins = 0; flag.value.load(std::memory_order_acquire) < chunk; ++spins) {
    if (spins < 20000) {
      __builtin_ia32_pause();
    } else {
      sched_yield();
    }
  }
}

struct Limit {
  Flag* flags;
  float* slots;
  int rank, world;
  std::uint64_t chunk = 0;

  float* slot(int r, std::uint64_t number) const {
    return slots + (static_cast<std::size_t>(r) * 2 + number % 2) * kChunk;
  }

  void all_reduce(float* data, std::size_t count) {
    for (std::size_t begin = 0; begin < count; begin += kChunk) {
      const std::size_t n = std::min(kChunk, count - begin);
      ++chunk;
      std::memcpy(slot(rank, chunk), data + begin, n * sizeof(float));
      flags[rank].value.store(chunk, std::memory_order_release);
      for (int r = 0; r < world; ++r) {
        wait_for(flags[r], chunk);
      }
      float* __restrict out = data + begin;
      const float* __restrict first = slot(0, chunk);
      const float* __restrict second = slot(world > 1 ? 1 : 0, chunk);
      if (world == 1) continue;
      for (std::size_t i = 0; i < n; ++i) out[i] = first[i] + second[i];
      for (int r = 2; r < world; ++r) {
        const float* __restrict more = slot(r, chunk);
        for (std::size_t i = 0; i < n; ++i) out[i] += more[i];
      }
    }
  }
};

}  // namespace

extern "C" {

std::size_t limit_bytes(int world) { return world * (sizeof(Flag) + 2 * kChunk * sizeof(float)); }

// `memory`: limit_bytes(world) zero bytes, cache-line aligned, shared by all ranks.
void* limit_create(void* memory, int rank, int world) {
  auto* flags = static_cast<Flag*>(memory);
  return new Limit{flags, reinterpret_cast<float*>(flags + world), rank, world};
}

void limit_destroy(void* limit) { delete static_cast<Limit*>(limit); }

// Sums in place, `calls` times over, going round `sets` arrays.
void limit_all_reduce(void* limit, float** data, int sets, std::size_t count, int calls) {
  for (int call = 0; call < calls; ++call) {
    static_cast<Limit*>(limit)->all_reduce(data[call % sets], count);
  }
}
}
