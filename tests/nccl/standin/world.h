// What the ranks of one communicator share: a file named by the unique id, mapped by all, unlinked
// when all have come. Every pair of ranks has a mailbox per channel: a ring of bytes, first in
// first out.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace standin {

constexpr int most_ranks = 8;
constexpr std::size_t ring_bytes = 4096;
enum Channel { data_channel, control_channel, put_channel, channels };

struct Mailbox {
  std::atomic<std::uint64_t> written, taken;
  char ring[ring_bytes];
};

struct World {
  std::atomic<int> joined, finalized, destroyed;
  Mailbox boxes[channels][most_ranks][most_ranks];  // [from][to]
};

struct Transfer {
  int peer;
  char* bytes;
  std::size_t size;
  std::size_t done = 0;
};

using Stop = std::function<bool()>;

inline void nap(int round) { ::usleep(round < 20 ? 50 : 1000); }

// Waits until `ready`. Gives false when told to stop first.
inline bool wait_until(const std::function<bool()>& ready, const Stop& stop) {
  for (int round = 0; !ready(); ++round) {
    if (stop()) return false;
    nap(round);
  }
  return true;
}

inline World* open_world(const std::string& name) {
  const char* folder = std::getenv("STANDIN_DIR");
  const std::string path = std::string(folder != nullptr ? folder : "/dev/shm") + "/" + name;
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return nullptr;
  void* memory = MAP_FAILED;
  if (::ftruncate(file, sizeof(World)) == 0) {
    memory = ::mmap(nullptr, sizeof(World), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  ::close(file);
  return memory == MAP_FAILED ? nullptr : static_cast<World*>(memory);
}

inline void forget_world(const std::string& name) {
  const char* folder = std::getenv("STANDIN_DIR");
  ::unlink((std::string(folder != nullptr ? folder : "/dev/shm") + "/" + name).c_str());
}

inline bool push(Mailbox& box, Transfer& t) {
  const std::uint64_t written = box.written.load(std::memory_order_relaxed);
  const std::size_t room = ring_bytes - (written - box.taken.load(std::memory_order_acquire));
  const std::size_t now = std::min(room, t.size - t.done);
  for (std::size_t i = 0; i < now; ++i) box.ring[(written + i) % ring_bytes] = t.bytes[t.done + i];
  box.written.store(written + now, std::memory_order_release);
  t.done += now;
  return now > 0;
}

inline bool pull(Mailbox& box, Transfer& t) {
  const std::uint64_t taken = box.taken.load(std::memory_order_relaxed);
  const std::size_t there = box.written.load(std::memory_order_acquire) - taken;
  const std::size_t now = std::min(there, t.size - t.done);
  for (std::size_t i = 0; i < now; ++i) t.bytes[t.done + i] = box.ring[(taken + i) % ring_bytes];
  box.taken.store(taken + now, std::memory_order_release);
  t.done += now;
  return now > 0;
}

// All transfers at once; those of one pair in their order. Gives false when told to stop.
inline bool exchange(World& world, Channel channel, int rank, std::vector<Transfer>& sends,
                     std::vector<Transfer>& receives, const Stop& stop) {
  int idle = 0;
  for (;;) {
    if (stop())
      return false;  // first: what an aborted rank has queued must not follow half a message
    bool moved = false, left = false;
    bool blocked_out[most_ranks] = {}, blocked_in[most_ranks] = {};
    for (Transfer& t : sends) {
      if (t.done == t.size || blocked_out[t.peer]) continue;
      moved = push(world.boxes[channel][rank][t.peer], t) || moved;
      blocked_out[t.peer] = t.done < t.size;
      left = left || t.done < t.size;
    }
    for (Transfer& t : receives) {
      if (t.done == t.size || blocked_in[t.peer]) continue;
      moved = pull(world.boxes[channel][t.peer][rank], t) || moved;
      blocked_in[t.peer] = t.done < t.size;
      left = left || t.done < t.size;
    }
    if (!left) return true;
    idle = moved ? 0 : idle + 1;
    if (!moved) nap(idle);
  }
}

}  // namespace standin
