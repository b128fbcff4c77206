// How the ranks of a process group find each other through torch's key-value store.
//
// Protocol "meet", under the group's own key prefix:
//   ticket/R         how often rank R has come here; it numbers the meeting, so that a store that
//                    outlives a group cannot mix up two of them
//   MEETING/host/R   set by rank R: its host identity; its presence says that R has come
//   MEETING/id/H     set by the first rank of host H: the random id of that host's shared memory
//   MEETING/over     set by a rank that gave up: whoever waits here, or comes later, takes its next
//                    ticket, so that a rank that tries again meets those who come for the first
//                    time
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "base/deadline.h"
#include "shm/communicator.h"

namespace pyparallel::dist {

struct Seat {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  std::string group = "world";
  std::chrono::milliseconds timeout{30000};
};

// Ranks by host: hosts in the order of their first ranks, ranks of a host ascending.
struct Topology {
  std::string prefix;                   // of this meeting's keys
  std::vector<std::vector<int>> hosts;  // ranks of each host
  std::vector<int> host_of;             // by rank
  std::vector<std::string> identities;  // by host
};

// Whether all keys are there before the deadline. Ends on Ctrl-C too, whatever kind of store it is.
bool wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, Deadline deadline);

// Waits until all ranks have come. Throws Timeout naming the absent ones.
Topology meet(const Seat& seat, Deadline deadline);
// After a failure of what follows the meeting: it is over for all ranks.
void give_up(const Seat& seat, const Topology& topology) noexcept;

// The id that the first rank of `host` makes and the others of that host read.
shm::UniqueId host_unique_id(const Seat& seat, const Topology& topology, int host,
                             Deadline deadline);

}  // namespace pyparallel::dist
