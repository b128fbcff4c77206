#include "torch/roll_call.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "shm/liveness.h"

namespace pyparallel::dist {
namespace {

constexpr std::chrono::milliseconds kBeat{250};
constexpr int kBeatsPerLook = 4;  // at whether another rank has ended the group
constexpr std::size_t kLongestText = 4096;
constexpr std::uint32_t kMagic = 0x4c4c4f52;  // "ROLL"

}  // namespace

struct RollCallRecord {
  std::uint32_t magic = kMagic;
  std::int32_t pid = 0;
  std::uint64_t start_time = 0;
  std::uint64_t pid_namespace = 0;
  std::uint64_t sequence = 0;  // of the last call; 0: none yet
  std::uint32_t left = 0;
  char name[28] = {};

  shm::ProcessIdentity process() const { return {pid, start_time, pid_namespace}; }
  void call(const char* text) {
    std::strncpy(name, text, sizeof name - 1);
    name[sizeof name - 1] = '\0';
  }
};

struct RollCall::State {
  State(const Seat& from, const Topology& topology)
      : seat(from),
        prefix(topology.prefix + "roll/"),
        host_of(topology.host_of),
        identities(topology.identities) {
    const auto self = shm::ProcessIdentity::of_this_process();
    mine.pid = self.pid;
    mine.start_time = self.start_time;
    mine.pid_namespace = self.pid_namespace;
  }

  bool here(int rank) const { return host_of[at(rank)] == host_of[at(seat.rank)]; }
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  std::string key(int rank) const { return str(prefix, rank); }

  void write(const RollCallRecord& record) const {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&record);
    seat.store->set(key(seat.rank), std::vector<std::uint8_t>(bytes, bytes + sizeof record));
  }
  // False where the rank has written nothing (or something else than a record).
  bool read(int rank, RollCallRecord* record) const {
    if (!seat.store->check({key(rank)})) return false;
    const auto bytes = seat.store->get(key(rank));
    if (bytes.size() != sizeof *record) return false;
    std::memcpy(record, bytes.data(), sizeof *record);
    record->name[sizeof record->name - 1] = '\0';
    return record->magic == kMagic;
  }

  void write_end(const std::string& why) const noexcept {
    try {
      const std::string text = why.substr(0, kLongestText);
      seat.store->set(prefix + "end", std::vector<std::uint8_t>(text.begin(), text.end()));
    } catch (const std::exception&) {
      // The store is gone, and with it whoever could be told.
    }
  }
  // Why another rank has ended the group; empty while none has.
  std::string read_end() const {
    if (!seat.store->check({prefix + "end"})) return "";
    const auto bytes = seat.store->get(prefix + "end");
    return {bytes.begin(),
            bytes.begin() + static_cast<std::ptrdiff_t>(std::min(bytes.size(), kLongestText))};
  }

  const Seat seat;
  const std::string prefix;
  const std::vector<int> host_of;
  const std::vector<std::string> identities;

  std::mutex mutex;
  std::condition_variable changed;
  RollCallRecord mine;
  bool stopped = false;
};

// The processes of this host that a rank looks after.
class RollCall::Neighbours {
 public:
  explicit Neighbours(const State& state) {
    for (int rank = 0; rank < state.seat.size; ++rank)
      if (rank != state.seat.rank && state.here(rank)) unknown_.push_back(rank);
  }

  // Empty, or which of them has ended without leaving.
  std::string ended(const State& state) {
    RollCallRecord record;
    for (std::size_t i = unknown_.size(); i-- > 0;) {
      if (!state.read(unknown_[i], &record)) continue;
      known_.push_back({unknown_[i], std::make_unique<shm::ProcessWatch>(record.process())});
      unknown_.erase(unknown_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    for (std::size_t i = known_.size(); i-- > 0;) {
      if (known_[i].process->alive()) continue;
      const int rank = known_[i].rank;
      known_.erase(known_.begin() + static_cast<std::ptrdiff_t>(i));
      if (state.read(rank, &record) && record.left != 0) continue;
      return str("group ", state.seat.group, ": rank ", rank, " (pid ", record.pid,
                 ") died; its last call was ",
                 record.sequence == 0 ? "none" : str("#", record.sequence, " ", record.name),
                 ". Seen from rank ", state.seat.rank);
    }
    return "";
  }

 private:
  struct Known {
    int rank;
    std::unique_ptr<shm::ProcessWatch> process;
  };
  std::vector<int> unknown_;
  std::vector<Known> known_;
};

RollCall::RollCall(const Seat& seat, const Topology& topology)
    : state_(std::make_shared<State>(seat, topology)) {
  state_->write(state_->mine);
}

void RollCall::begin(std::function<void(const std::string&)> lost) {
  const auto beat = [state = state_, lost = std::move(lost)] {
    Neighbours neighbours(*state);
    std::uint64_t seen = 0, written = 0;
    int beats = 0;  // since the last call
    std::unique_lock<std::mutex> lock(state->mutex);
    while (!state->changed.wait_for(lock, kBeat, [&] { return state->stopped; })) {
      const RollCallRecord mine = state->mine;
      const bool stands = mine.sequence == seen;
      seen = mine.sequence;
      lock.unlock();
      if (stands && written != seen) {
        state->write(mine);
        written = seen;
      }
      std::string ended = neighbours.ended(*state);
      if (!ended.empty()) {
        state->write_end(ended);
        return lost(ended);
      }
      beats = stands ? beats + 1 : 0;
      if (beats % kBeatsPerLook == kBeatsPerLook - 1) ended = state->read_end();
      if (!ended.empty()) return lost(ended);
      lock.lock();
    }
  };
  // The store is gone, and with it whoever could be told.
  start_thread(str("group ", state_->seat.group, ": the thread of its roll call"), beat,
               [](const std::exception_ptr&) noexcept {});
}

RollCall::~RollCall() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->stopped = true;
  state_->changed.notify_all();
}

void RollCall::launched(std::uint64_t sequence, const char* name) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->mine.sequence = sequence;
  state_->mine.call(name);
}

void RollCall::end(const std::string& why) noexcept {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->stopped) return;
  }
  state_->write_end(why);
}

void RollCall::leave() noexcept {
  RollCallRecord mine;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->stopped) return;
    state_->stopped = true;
    state_->changed.notify_all();
    state_->mine.left = 1;
    mine = state_->mine;
  }
  try {
    state_->write(mine);
  } catch (const std::exception&) {
    // The store is gone, and with it whoever could be told.
  }
}

std::string RollCall::absent() const {
  RollCallRecord mine;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    mine = state_->mine;
  }
  std::string text;
  for (int rank = 0; rank < state_->seat.size; ++rank) {
    if (rank == state_->seat.rank) continue;
    RollCallRecord record;
    const bool known = state_->read(rank, &record);
    if (known && record.left == 0 && record.sequence >= mine.sequence) continue;
    text += str(text.empty() ? "" : "; ", "rank ", rank);
    if (!known) {
      text += " has not come to the group's first call";
      continue;
    }
    if (state_->here(rank))
      text +=
          str(" (pid ", record.pid, ", process ", shm::ProcessWatch(record.process()).state(), ")");
    else
      text += str(" (host ", state_->identities[State::at(state_->host_of[State::at(rank)])], ")");
    if (record.left != 0)
      text += " has left the group";
    else if (record.sequence == 0)
      text += " has made no call";
    else
      text += str(" is at #", record.sequence, " ", record.name);
  }
  return str("this rank is at #", mine.sequence, " ", mine.name, "; ",
             text.empty() ? "all others have launched as much" : text);
}

}  // namespace pyparallel::dist
