#include "torch/group.h"

#include "torch/hierarchical.h"

namespace pyparallel::dist {

std::shared_ptr<shm::Communicator> open_group(const Seat& seat, const GlooFactory& gloo) {
  const Deadline deadline = Deadline::after(seat.timeout);
  const Topology topology = meet(seat, deadline);
  try {
    if (topology.hosts.size() > 1) {
      return HierarchicalCommunicator::join(seat, topology, gloo, deadline);
    }
    shm::Options options;
    options.name = seat.group;
    options.timeout = seat.timeout;
    return shm::Communicator::join(host_unique_id(seat, topology, 0, deadline), seat.rank,
                                   seat.size, options);
  } catch (...) {
    give_up(seat, topology);
    throw;
  }
}

}  // namespace pyparallel::dist
