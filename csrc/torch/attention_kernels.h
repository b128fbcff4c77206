// What attention.cpp hands to the kernels of one instruction set, and how they are found. Plain
// data alone: the files that are compiled for an instruction set include nothing else of ours.
#pragma once

#include <cstdint>

namespace pyparallel::dist::attention {

enum class Element { f32, bf16, f16 };

// A tensor [batch, row, head, column]; strides in elements.
struct Strided {
  void* data;
  std::int64_t batch, row, head, column;
};

// Consecutive rows of a shard whose positions go up by `stride` in one document.
struct Tile {
  std::int64_t begin;
  std::int64_t count;
  std::int64_t position;
  std::int64_t stride;
  std::int64_t document;
};

struct Sizes {
  std::int64_t heads, kv_heads, width, value_width;
};

// Which keys a query sees, and what becomes of a score (pyparallel/attention/mask.py).
struct Rules {
  std::int64_t before, after;  // k_pos - q_pos lies in -before .. after
  float scale, softcap;
  const float* slopes;  // of ALiBi, or null
  std::int64_t slopes_batch, slopes_head;
  std::uint64_t dropped_below;  // words of the generator; 0: no dropout
  float kept_scale;
  std::uint64_t seed;
  std::int64_t first_head, all_heads;
};

// q tiles that see k tile t: seen[first[t]] .. seen[first[t + 1] - 1], in order.
struct Plan {
  const Tile* q_tiles;
  const Tile* k_tiles;
  std::int64_t k_count;
  const std::int64_t* first;
  const std::int64_t* seen;
};

struct Forward {
  Sizes sizes;
  Rules rules;
  Plan plan;
  Element element;
  Strided q, k, v;
  Strided row_max, row_sum, acc;  // float; columns of acc are dense
};

struct Backward {
  Sizes sizes;
  Rules rules;
  Plan plan;
  Element element;
  Strided q, k, v, dout;
  Strided lse, delta;  // float
  Strided dq, dk, dv;  // float; columns are dense
};

// One worker's share: of one kv head, the k tiles and q tiles whose number leaves this remainder.
struct Share {
  std::int64_t batch, kv_head;
  std::int64_t q_part, k_part;
  std::int64_t q_parts, k_parts;
};

// The most rows and columns of a tile. The columns keep a worker's operands within a 1 MB cache.
constexpr std::int64_t kTileRows = 96;
constexpr std::int64_t kForwardColumns = 256;
constexpr std::int64_t kBackwardColumns = 128;

// The most rows of q for whose sake a k tile is read as it lies.
constexpr std::int64_t kDirectRows = 4;

struct Kernels {
  const char* name;
  std::int64_t (*forward_scratch)(const Sizes&);  // floats that one worker needs
  std::int64_t (*backward_scratch)(const Sizes&);
  void (*forward)(const Forward&, const Share&, float* scratch);
  void (*backward)(const Backward&, const Share&, float* scratch);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Bf16;  // takes bf16 alone, and multiplies it as it is
#endif

}  // namespace pyparallel::dist::attention
