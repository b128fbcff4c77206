#include "symmetric/host_backing.h"

#include <unistd.h>

#include "base/error.h"
#include "symmetric/agreement.h"

namespace pyparallel::symmetric {

std::size_t page_size() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

HostBacking::HostBacking(std::shared_ptr<shm::Segment> file, std::uint64_t segment,
                         const Layout& layout)
    : file_(std::move(file)), segment_(segment), layout_(layout) {
  for (int r = 0; r < layout_.size; ++r) bases_.push_back(file_->data() + layout_.block_of(r));
}

void HostBacking::publish(int rank) {
  SymmetricRange region;
  region.segment = segment_;
  region.rank = rank;
  region.size = layout_.size;
  region.bytes = layout_.bytes;
  region.bases = bases_.data();
  registration_ = Registration(region);
}

std::shared_ptr<HostBacking> HostBacking::open(shm::Communicator& group, const shm::UniqueId& id,
                                               std::uint64_t segment, const Layout& layout,
                                               const Peers& peers, const std::string& name,
                                               Deadline deadline) {
  // A rank may die, or the group break, on the way here.
  const std::string joining = str("symmetric memory of group ", name, ", joining");
  const auto hopeful = [&] {
    for (int rank = 0; rank < peers.size(); ++rank) peers.require_alive(rank, joining);
  };
  auto file = shm::Segment::open(id, group.rank(), group.size(), layout.total(), 0, name, deadline,
                                 hopeful);
  auto backing = std::make_shared<HostBacking>(file, segment, layout);
  for (int turn = 0; turn < group.size(); ++turn)
    together(group, str("symmetric memory of group ", name, ", reserving the block"), deadline,
             [&] {
               if (turn != group.rank()) return;
               file->reserve(layout.block_of(turn), layout.block);
               backing->publish(turn);
             });
  return backing;
}

}  // namespace pyparallel::symmetric
