// Who has launched what: the ranks of a device group tell each other through the store, since NCCL
// does not know who is missing.
//
// Protocol "roll call" (a key per rank under the meeting's prefix, holding a fixed record that is
// checked before use)
//   writer  each rank, when its last call has stood for a beat, and when it leaves: a busy group
//           writes nothing, and once all have come to a halt what they have written is true
//   reader  a rank whose deadline has passed; and every rank, until it knows the processes of its
//           own host, which it then looks after
// Protocol "end" (one key under the same prefix, holding a text)
//   writer  whoever ends the group for a cause of its own: abort(), a call past its deadline, a
//           process that died. The last text stands
//   reader  a rank whose last call has stood for a second, and every second from then on
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "torch/rendezvous.h"

namespace pyparallel::dist {

class RollCall {
 public:
  RollCall(const Seat& seat, const Topology& topology);
  // Begins the beats, on a thread of its own, which calls `lost` once: when a process of this host
  // ends that has not left (the other ranks are told), or when another rank has ended the group.
  void begin(std::function<void(const std::string& why)> lost);
  ~RollCall();  // never waits
  RollCall(const RollCall&) = delete;
  RollCall& operator=(const RollCall&) = delete;

  // This rank's last call.
  void launched(std::uint64_t sequence, const char* name);
  // Tells the other ranks why this one ends the group; their beats call `lost` with the text.
  void end(const std::string& why) noexcept;
  // This rank is done with the group: from now on its process may end.
  void leave() noexcept;
  // "rank 1 (pid 17, alive) is at #6 broadcast; rank 2 has made no call": who is behind this rank.
  // Takes as long as the store does.
  std::string absent() const;

 private:
  struct State;
  class Neighbours;
  const std::shared_ptr<State> state_;
};

}  // namespace pyparallel::dist
