#include "symmetric/device_choice.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "symmetric/layout.h"

namespace pyparallel::symmetric {
namespace {

// Ranks whose facts lack something: "1 3"; empty when all have it.
template <typename Has>
std::string ranks_without(const std::vector<DeviceFacts>& facts, const Has& has) {
  std::string ranks;
  for (std::size_t r = 0; r < facts.size(); ++r)
    if (!has(facts[r])) ranks += str(ranks.empty() ? "" : " ", r);
  return ranks;
}

bool any_shared_device(const std::vector<DeviceFacts>& facts) {
  for (std::size_t a = 0; a < facts.size(); ++a)
    for (std::size_t b = 0; b < a; ++b)
      if (std::memcmp(&facts[a].uuid, &facts[b].uuid, sizeof(cuda::Uuid)) == 0) return true;
  return false;
}

}  // namespace

DeviceChoice choose(const std::vector<DeviceFacts>& facts, bool want_multicast) {
  DeviceChoice choice;
  const auto note = [&](const std::string& text) {
    choice.notes += str(choice.notes.empty() ? "" : "; ", text);
  };
  const auto offer = [&](Share share, const auto& has) {
    const std::string without = ranks_without(facts, has);
    if (without.empty())
      choice.shares.push_back(share);
    else
      note(str("no ", name_of(share), ": rank ", without, " lacks it"));
  };
  offer(Share::posix_fd, [](const DeviceFacts& f) { return f.posix_fd != 0; });
  offer(Share::fabric, [](const DeviceFacts& f) { return f.fabric != 0; });
  offer(Share::cuda_ipc, [](const DeviceFacts& f) { return f.ipc != 0; });

  const std::string without =
      ranks_without(facts, [](const DeviceFacts& f) { return f.multicast != 0; });
  if (!want_multicast)
    note("no multicast: not asked for");
  else if (facts.size() < 2)
    note("no multicast: the group has one rank");
  else if (!without.empty())
    note(str("no multicast: the device or driver of rank ", without, " lacks it"));
  else if (any_shared_device(facts))
    note("no multicast: ranks share a device");
  else if (choice.shares.empty() || choice.shares.front() == Share::cuda_ipc)
    note("no multicast: it needs memory as handles");
  else
    choice.multicast = true;

  choice.granularity = kUnit;
  for (const DeviceFacts& f : facts) {
    choice.granularity = std::max(choice.granularity, f.granularity);
    if (choice.multicast)
      choice.granularity = std::max(choice.granularity, f.multicast_granularity);
  }
  return choice;
}

}  // namespace pyparallel::symmetric
