// What a caller may ask of a new communicator. Unset fields are left to the library.
#pragma once

#include <optional>
#include <string>

#include "nccl/abi.h"

namespace pyparallel::nccl {

class Library;

//   X(our field, type, major, minor, patch): the first release that knows the field
#define PYPARALLEL_NCCL_CONFIG_FIELDS(X)  \
  X(blocking, int, 2, 14, 3)              \
  X(cga_cluster_size, int, 2, 17, 1)      \
  X(min_ctas, int, 2, 17, 1)              \
  X(max_ctas, int, 2, 17, 1)              \
  X(net_name, std::string, 2, 17, 1)      \
  X(split_share, int, 2, 18, 1)           \
  X(traffic_class, int, 2, 26, 2)         \
  X(comm_name, std::string, 2, 27, 3)     \
  X(collnet_enable, int, 2, 27, 3)        \
  X(cta_policy, int, 2, 27, 3)            \
  X(shrink_share, int, 2, 27, 3)          \
  X(nvls_ctas, int, 2, 27, 3)             \
  X(channels_per_net_peer, int, 2, 28, 3) \
  X(nvlink_centric_sched, int, 2, 28, 3)  \
  X(graph_usage_mode, int, 2, 29, 2)      \
  X(num_rma_ctx, int, 2, 29, 2)           \
  X(max_p2p_peers, int, 2, 30, 3)         \
  X(graph_stream_ordering, int, 2, 30, 5)

struct Config {
#define PYPARALLEL_NCCL_CONFIG_MEMBER(name, type, major, minor, patch) std::optional<type> name;
  PYPARALLEL_NCCL_CONFIG_FIELDS(PYPARALLEL_NCCL_CONFIG_MEMBER)
#undef PYPARALLEL_NCCL_CONFIG_MEMBER

  bool empty() const;
  // The record in the oldest layout that has every field which is set; it points into this object.
  // Throws Unsupported when the library is older than that: a field would be ignored.
  ConfigRecord record(const Library& library) const;
};

}  // namespace pyparallel::nccl
