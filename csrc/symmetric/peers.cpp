#include "symmetric/peers.h"

#include "base/error.h"
#include "base/interrupt.h"
#include "symmetric/agreement.h"

namespace pyparallel::symmetric {

Peers::Peers(shm::Communicator& group, Deadline deadline) : group_(group) {
  const auto mine = shm::ProcessIdentity::of_this_process();
  for (const auto& identity : gather_all(group, mine, deadline))
    watches_.push_back(std::make_unique<shm::ProcessWatch>(identity));
}

std::string Peers::describe(int rank) const {
  shm::ProcessWatch& watch = *watches_[static_cast<std::size_t>(rank)];
  return str("rank ", rank, " (pid ", watch.visible_pid(), ", ", watch.state(), ")");
}

void Peers::require_alive(int rank, const std::string& what) const {
  const std::string failure = group_.failure();
  if (!failure.empty()) throw Aborted(str(what, ": ", failure));
  if (interrupt_requested()) throw Interrupted(str(what, ": interrupted"));
  if (watches_[static_cast<std::size_t>(rank)]->alive()) return;
  const std::string text = str(what, ": ", describe(rank), " has ended");
  group_.abort(text);
  throw PeerLost(text);
}

}  // namespace pyparallel::symmetric
