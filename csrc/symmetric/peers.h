// The other ranks of a group as processes: for waits that are not the communicator's own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "shm/communicator.h"
#include "shm/liveness.h"

namespace pyparallel::symmetric {

class Peers {
 public:
  // Collective. The group outlives it.
  Peers(shm::Communicator& group, Deadline deadline);

  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }
  // "rank 2 (pid 17, stopped)"
  std::string describe(int rank) const;
  // Throws what broke the group, Interrupted after a signal, and PeerLost (which also breaks the
  // group, so that all ranks hear of it) when the process of `rank` has ended. `what` begins the
  // message. Costs system calls: for waits that sleep.
  void require_alive(int rank, const std::string& what) const;

 private:
  shm::Communicator& group_;
  std::vector<std::unique_ptr<shm::ProcessWatch>> watches_;
};

}  // namespace pyparallel::symmetric
