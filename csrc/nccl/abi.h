// NCCL's binary interface in our own words: handles, codes and the configuration record, as far as
// this binding uses them. No NCCL header is needed to build, and no release of it is presumed.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

namespace pyparallel::nccl {

using RawComm = struct OpaqueComm*;
using RawWindow = struct OpaqueWindow*;
using Stream = void*;  // cudaStream_t and CUstream; null is the default stream

// The library passes this record by value.
struct UniqueId {
  static constexpr std::size_t size = 128;
  char bytes[size];
};

// The codes grow from release to release: a value that is not listed here is an error all the same.
enum class Result : int {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,  // 2.13.4
  in_progress = 7,   // 2.14.3; not an error: ask again
  timeout = 8,       // 2.30
};

enum class DataType : int {
  i8 = 0,
  u8 = 1,
  i32 = 2,
  u32 = 3,
  i64 = 4,
  u64 = 5,
  f16 = 6,
  f32 = 7,
  f64 = 8,
  bf16 = 9,
  f8e4m3 = 10,
  f8e5m2 = 11,
};

// Values above avg are handles that the library makes (RedOpCreatePreMulSum).
enum class RedOp : int { sum = 0, product = 1, max = 2, min = 3, avg = 4 };

enum class ScalarResidence : int { device = 0, host = 1 };

constexpr int undefined_int = INT_MIN;
constexpr unsigned config_magic = 0xcafebeefU;
constexpr int split_no_color = -1;
constexpr int shrink_default = 0;
constexpr int shrink_abort = 1;
constexpr int revoke_default = 0;
constexpr int suspend_memory = 1;
constexpr int window_default = 0;
constexpr int window_symmetric = 1;
constexpr std::size_t window_alignment = 4096;

enum class MemoryStat : int { suspendable = 0, suspended = 1, persistent = 2, total = 3 };

struct WaitSignalRecord {
  int count;  // signals
  int peer;
  int signal;
  int context;
};

// As it was in 2.22.3; `version` names that, as with ConfigRecord.
struct SimulationRecord {
  std::size_t size = sizeof(SimulationRecord);
  unsigned magic = 0x74685283U;
  unsigned version = 22203;
  float estimated_time = -1.0F;
};
static_assert(sizeof(SimulationRecord) == 24 && sizeof(WaitSignalRecord) == 16);

// The configuration record as it was in 2.30.5. Releases only append, and a library reads no more
// than `size` bytes, of which `version` tells it the fields that have a meaning. So the record is
// handed over as the *oldest* release whose layout holds every field that was set (config.h), never
// as the release of the library that was found.
struct ConfigRecord {
  std::size_t size = 0;
  unsigned magic = config_magic;
  unsigned version = 0;
  int blocking = undefined_int;               // 2.14.3
  int cga_cluster_size = undefined_int;       // 2.17.1
  int min_ctas = undefined_int;               // 2.17.1
  int max_ctas = undefined_int;               // 2.17.1
  const char* net_name = nullptr;             // 2.17.1
  int split_share = undefined_int;            // 2.18.1
  int traffic_class = undefined_int;          // 2.26.2
  const char* comm_name = nullptr;            // 2.27.3
  int collnet_enable = undefined_int;         // 2.27.3
  int cta_policy = undefined_int;             // 2.27.3
  int shrink_share = undefined_int;           // 2.27.3
  int nvls_ctas = undefined_int;              // 2.27.3
  int channels_per_net_peer = undefined_int;  // 2.28.3
  int nvlink_centric_sched = undefined_int;   // 2.28.3
  int graph_usage_mode = undefined_int;       // 2.29.2
  int num_rma_ctx = undefined_int;            // 2.29.2
  int max_p2p_peers = undefined_int;          // 2.30.3
  int graph_stream_ordering = undefined_int;  // 2.30.5
};
static_assert(sizeof(std::size_t) == 8 && sizeof(ConfigRecord) == 96);
static_assert(offsetof(ConfigRecord, net_name) == 32 && offsetof(ConfigRecord, comm_name) == 48);

}  // namespace pyparallel::nccl
