// How a group of CUDA devices shares memory: a pure function of what every rank says about its
// device, so that all ranks choose alike, and each capability that lacks costs only itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "symmetric/cuda_abi.h"

namespace pyparallel::symmetric {

enum class Share : std::uint8_t { posix_fd, fabric, cuda_ipc };

constexpr const char* name_of(Share share) {
  constexpr const char* names[] = {"posix fd", "fabric", "cuda ipc"};
  return names[static_cast<int>(share)];
}

// What one rank says. Fixed size: it travels.
struct DeviceFacts {
  cuda::Uuid uuid{};
  std::int32_t ordinal = 0;
  std::uint8_t posix_fd = 0;  // memory as handles that travel as file descriptors
  std::uint8_t fabric = 0;    // memory as handles that travel as bytes
  std::uint8_t ipc = 0;
  std::uint8_t multicast = 0;
  std::uint64_t granularity = 0;            // of handles, 0 where there are none
  std::uint64_t multicast_granularity = 0;  // 0 where there is no multicast
};

struct DeviceChoice {
  std::vector<Share> shares;  // to try in this order; empty: nothing is possible
  bool multicast = false;
  std::uint64_t granularity = 0;  // of a block
  std::string notes;              // why not more: a sentence per capability
};

// `facts` are by rank, and alike on all ranks.
DeviceChoice choose(const std::vector<DeviceFacts>& facts, bool want_multicast);

}  // namespace pyparallel::symmetric
