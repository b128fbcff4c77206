// Symmetric host memory: all ranks' blocks in one anonymous memory file, mapped whole by each rank.
#pragma once

#include <memory>
#include <vector>

#include "shm/bootstrap.h"
#include "symmetric/peers.h"
#include "symmetric/registry.h"
#include "symmetric/symmetric_memory.h"

namespace pyparallel::symmetric {

class HostBacking : public Backing {
 public:
  // Collective. `id` is fresh and alike on all ranks. Each rank reserves its own block, one after
  // another, so that the check of what is free cannot be passed by two ranks at once.
  static std::shared_ptr<HostBacking> open(shm::Communicator& group, const shm::UniqueId& id,
                                           std::uint64_t segment, const Layout& layout,
                                           const Peers& peers, const std::string& name,
                                           Deadline deadline);

  std::byte* block(int rank) const override { return bases_[static_cast<std::size_t>(rank)]; }
  const char* kind() const override { return "memory file"; }
  const Layout& layout() const override { return layout_; }
  std::uint64_t segment() const override { return segment_; }

  // Made by open().
  HostBacking(std::shared_ptr<shm::Segment> file, std::uint64_t segment, const Layout& layout);

 private:
  void publish(int rank);

  const std::shared_ptr<shm::Segment> file_;
  const std::uint64_t segment_;
  const Layout layout_;
  std::vector<std::byte*> bases_;
  Registration registration_;  // goes before the mapping does
};

// Page size of the machine: granularity of host blocks.
std::size_t page_size();

}  // namespace pyparallel::symmetric
