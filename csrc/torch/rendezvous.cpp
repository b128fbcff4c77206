#include "torch/rendezvous.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/host_identity.h"
#include "base/interrupt.h"

namespace pyparallel::dist {
namespace {

using Bytes = std::vector<std::uint8_t>;

enum class Waited { come, late, over };

std::string over_key(const Topology& topology) { return topology.prefix + "over"; }

// Polls with growing pauses: ends on time, and on Ctrl-C. `over` may be empty.
Waited wait_for(c10d::Store& store, const std::vector<std::string>& keys, const std::string& over,
                Deadline deadline) {
  std::chrono::milliseconds pause(1);
  // Whoever gave up has been there as well: what is over is over, though all keys are there.
  for (bool come = false;; come = store.check(keys)) {
    if (!over.empty() && store.check({over})) return Waited::over;
    if (come) return Waited::come;
    if (deadline.expired()) return Waited::late;
    if (interrupt_requested()) throw Interrupted("a signal ended the rendezvous");
    std::this_thread::sleep_for(std::min<Deadline::Duration>(pause, deadline.remaining()));
    pause = std::min(pause * 2, std::chrono::milliseconds(50));
  }
}

std::string host_key(const Topology& topology, int rank) {
  return str(topology.prefix, "host/", rank);
}

// `earlier`: who came to a meeting that was given up.
[[noreturn]] void throw_absent(const Seat& seat, const Topology& topology,
                               const std::set<int>& earlier, Deadline deadline) {
  std::string absent;
  int count = 0;
  for (int rank = 0; rank < seat.size; ++rank) {
    if (earlier.count(rank) != 0 || seat.store->check({host_key(topology, rank)})) continue;
    absent += str(count++ == 0 ? "" : ", ", rank);
  }
  if (count == 0) {
    throw Timeout(str("group ", seat.group, ": rendezvous: all ", seat.size,
                      " ranks came, but some gave up before others came; not all were there at ",
                      "once within ", deadline.timeout_seconds(), " s. Seen from rank ",
                      seat.rank));
  }
  throw Timeout(str("group ", seat.group, ": rendezvous: ", count, " of ", seat.size,
                    " ranks absent after ", deadline.timeout_seconds(), " s: rank",
                    count == 1 ? " " : "s ", absent, ". Seen from rank ", seat.rank,
                    ". Check that these processes were started, with this world size and store."));
}

std::string read_identity(const Seat& seat, const Topology& topology, int rank) {
  const Bytes bytes = seat.store->get(host_key(topology, rank));
  const bool printable =
      std::all_of(bytes.begin(), bytes.end(), [](std::uint8_t c) { return c > ' ' && c < 127; });
  PYPARALLEL_REQUIRE(printable && !bytes.empty() && bytes.size() <= 256, "group ", seat.group,
                     ": rank ", rank, " wrote ", bytes.size(),
                     " bytes that are no host identity; is the store shared with something else?");
  return std::string(bytes.begin(), bytes.end());
}

}  // namespace

bool wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, Deadline deadline) {
  return wait_for(store, keys, "", deadline) == Waited::come;
}

Topology meet(const Seat& seat, Deadline deadline) {
  PYPARALLEL_REQUIRE(seat.size >= 1 && seat.rank >= 0 && seat.rank < seat.size, "group ",
                     seat.group, ": rank ", seat.rank, " of ", seat.size,
                     "; expected 0 <= rank < size");
  Topology topology;
  const std::string mine = host_identity();
  std::set<int> earlier;
  for (Waited waited = Waited::over; waited == Waited::over;) {
    for (int rank = 0; !topology.prefix.empty() && rank < seat.size; ++rank) {
      if (seat.store->check({host_key(topology, rank)})) earlier.insert(rank);
    }
    const std::int64_t meeting = seat.store->add(str("pyparallel/ticket/", seat.rank), 1);
    topology.prefix = str("pyparallel/", meeting, "/");
    if (seat.store->check({over_key(topology)})) continue;
    seat.store->set(host_key(topology, seat.rank), Bytes(mine.begin(), mine.end()));
    std::vector<std::string> keys;
    for (int rank = 0; rank < seat.size; ++rank) keys.push_back(host_key(topology, rank));
    waited = wait_for(*seat.store, keys, over_key(topology), deadline);
    if (waited == Waited::late) {
      give_up(seat, topology);
      throw_absent(seat, topology, earlier, deadline);
    }
  }

  for (int rank = 0; rank < seat.size; ++rank) {
    const std::string identity = read_identity(seat, topology, rank);
    const auto known = std::find(topology.identities.begin(), topology.identities.end(), identity);
    const auto host = static_cast<std::size_t>(known - topology.identities.begin());
    if (known == topology.identities.end()) {
      topology.identities.push_back(identity);
      topology.hosts.emplace_back();
    }
    topology.hosts[host].push_back(rank);
    topology.host_of.push_back(static_cast<int>(host));
  }
  return topology;
}

void give_up(const Seat& seat, const Topology& topology) noexcept {
  try {
    seat.store->set(over_key(topology), Bytes{1});
  } catch (const std::exception&) {
    // The store is gone, and with it all who might meet there.
  }
}

shm::UniqueId host_unique_id(const Seat& seat, const Topology& topology, int host,
                             Deadline deadline) {
  const std::string key = str(topology.prefix, "id/", host);
  const int first = topology.hosts[static_cast<std::size_t>(host)].front();
  shm::UniqueId id;
  if (seat.rank == first) {
    id = shm::UniqueId::random();
    seat.store->set(key, Bytes(id.bytes.begin(), id.bytes.end()));
    return id;
  }
  const Waited waited = wait_for(*seat.store, {key}, over_key(topology), deadline);
  if (waited == Waited::over) {
    throw PeerLost(str("group ", seat.group, ": rendezvous: a rank gave up while rank ", first,
                       "'s id was awaited. Seen from rank ", seat.rank,
                       "; look for the other ranks' own errors."));
  }
  if (waited == Waited::late) {
    throw Timeout(str("group ", seat.group, ": rendezvous: rank ", first, " came, but wrote no id ",
                      "within ", deadline.timeout_seconds(), " s. Seen from rank ", seat.rank,
                      "; look for that rank's own error."));
  }
  const Bytes bytes = seat.store->get(key);
  PYPARALLEL_REQUIRE(bytes.size() == id.bytes.size(), "group ", seat.group, ": rank ", first,
                     " wrote an id of ", bytes.size(), " bytes; expected ", id.bytes.size());
  std::copy(bytes.begin(), bytes.end(), id.bytes.begin());
  return id;
}

}  // namespace pyparallel::dist
