// What carries bytes between the ranks of a group that are on different hosts.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "base/deadline.h"
#include "shm/communicator.h"

namespace pyparallel::hosts {

// What a message is for. Messages of one kind between two ranks arrive in the order of their
// sends; kinds do not see each other. Values go over the wire.
enum class Kind : int { agreement = 1, data = 2, header = 3, body = 4 };

// One rank's end. Thread-safe. Sender and receiver name the same number of bytes, at least one.
class Wire {
 public:
  virtual ~Wire() = default;

  // The caller keeps the bytes until the work is done. The work throws Timeout at its deadline and
  // PeerLost when the connection breaks; either way the wire may be of no more use.
  virtual std::shared_ptr<shm::Work> send(const void* data, std::size_t bytes, int to, Kind) = 0;
  virtual std::shared_ptr<shm::Work> recv(void* data, std::size_t bytes, int from, Kind) = 0;
  // From whoever sends first: its source() is known when it is done. One at a time.
  virtual std::shared_ptr<shm::Work> recv_any(void* data, std::size_t bytes, Kind) = 0;
  // Ends all that is under way, here and (by the broken connections) on the other hosts.
  virtual void abort(std::string_view why) noexcept = 0;
};

}  // namespace pyparallel::hosts
