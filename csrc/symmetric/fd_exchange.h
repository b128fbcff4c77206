// Ranks of one host hand each other file descriptors: one datagram socket per rank in the abstract
// name space, SCM_RIGHTS. Nothing is left in any file system.
//
// Protocol "hand over": a datagram {magic, secret, round, rank} with at most one descriptor; a
// round is one all_to_all() or broadcast(), in the same order on all ranks
//   writer    sends to each rank's socket; while a queue is full it goes on receiving
//   reader    takes what comes; drops what has another secret or another user's credentials (the
//             kernel's word); keeps what is of a later round for that round
//   progress  all sockets are bound before the first round begins (the constructor is collective),
//   and
//             nobody waits to send without receiving
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "shm/communicator.h"
#include "symmetric/peers.h"

namespace pyparallel::symmetric {

class FdExchange {
 public:
  using Secret = std::array<std::uint64_t, 3>;  // socket name, and two words that only ranks know

  // Collective.
  FdExchange(shm::Communicator& group, const Peers& peers, std::string where, Deadline deadline);

  // Every rank's descriptor, by rank; this rank's own entry stays empty. `fd` stays the caller's.
  std::vector<UniqueFd> all_to_all(int fd, Deadline deadline);
  // The root's descriptor; empty on the root, which keeps its own.
  UniqueFd broadcast(int fd, int root, Deadline deadline);

 private:
  struct Message;
  bool send_to(int rank, int fd);  // false when the queue is full
  void receive_one();              // into held_
  void exchange(const std::vector<int>& to, int fd, const std::vector<int>& from,
                std::vector<UniqueFd>* out, Deadline deadline);

  const Peers& peers_;
  const std::string where_;
  Secret secret_{};
  UniqueFd socket_;
  std::uint32_t round_ = 0;
  std::map<std::pair<std::uint32_t, int>, UniqueFd> held_;  // (round, rank)
};

}  // namespace pyparallel::symmetric
