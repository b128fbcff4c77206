#include "torch/group.h"

#include "base/error.h"

namespace pyparallel::dist {

std::shared_ptr<shm::Communicator> open_group(const Seat& seat, const GlooFactory& gloo) {
  const Deadline deadline = Deadline::after(seat.timeout);
  const Topology topology = meet(seat, deadline);
  if (topology.hosts.size() > 1) {
    throw Unsupported(str("group ", seat.group, " has ranks on ", topology.hosts.size(), " hosts (",
                          topology.identities.front(), ", ", topology.identities[1],
                          ", ...); this version serves ranks of one host"));
  }
  shm::Options options;
  options.name = seat.group;
  options.timeout = seat.timeout;
  return shm::Communicator::join(host_unique_id(seat, topology, 0, deadline), seat.rank, seat.size,
                                 options);
}

}  // namespace pyparallel::dist
