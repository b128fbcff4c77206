// Symmetric memory: the same allocation on every rank of a group, where each rank can address the
// others' bytes. Host memory (one anonymous memory file) or CUDA memory (device_backing.h).
//
// Who must call: create(), allocate(), release() and barrier() are collective over the group, in
// the same order with the same arguments; a misfit or a failure on one rank raises on every rank.
// The rest is local. Each memory has a private communicator, so it never meets other collectives of
// the group, and the groups of one process never meet each other.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "base/deadline.h"
#include "shm/communicator.h"
#include "symmetric/allocator.h"
#include "symmetric/layout.h"
#include "symmetric/signals.h"

namespace pyparallel::symmetric {

// What holds the bytes: mapped on construction, unmapped by the last owner (the memory or a tensor
// in it). The destructor never waits for a peer.
class Backing {
 public:
  virtual ~Backing() = default;
  // Start of a rank's block as this process addresses it.
  virtual std::byte* block(int rank) const = 0;
  // Where a store reaches, and a load adds, all ranks' blocks; nullptr without multicast hardware.
  virtual std::byte* multicast() const { return nullptr; }
  virtual int device() const { return -1; }
  // How ranks share it: "memory file", "posix fd", "fabric", "cuda ipc".
  virtual const char* kind() const = 0;
  // Why something better is not in use, a sentence each; empty where nothing is.
  virtual std::string notes() const { return {}; }
  virtual const Layout& layout() const = 0;
  // Random, alike on all ranks, never 0.
  virtual std::uint64_t segment() const = 0;
};

class HostBacking;

struct Options {
  std::string name;                          // for messages; the group's when empty
  std::chrono::milliseconds timeout{30000};  // of create() and of calls that name none
  int device = -1;                           // CUDA device, -1 for host memory
  int channels = 16;                         // signal channels
  bool multicast = true;                     // CUDA: use multicast where every device has it
};

// One rank's seat. close() may be called twice; neither it nor the destructor waits or throws.
// Memory stays mapped while an owner of backing() lives.
class SymmetricMemory {
 public:
  // Collective over `group`, which stays the caller's. `bytes` per rank, rounded up to pages.
  static std::shared_ptr<SymmetricMemory> create(shm::Communicator& group, std::size_t bytes,
                                                 const Options& options);
  ~SymmetricMemory();
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  int rank() const { return rank_; }
  int size() const { return layout().size; }
  const std::string& name() const { return name_; }
  std::uint64_t generation() const { return generation_; }  // alike on all ranks
  std::chrono::milliseconds timeout() const { return timeout_; }
  const Layout& layout() const { return backing_->layout(); }
  const std::shared_ptr<Backing>& backing() const { return backing_; }

  // --- memory. Offsets are from the start of a rank's data.
  // Collective. The offset of `bytes` fresh bytes (not cleared), alike on all ranks.
  std::size_t allocate(std::size_t bytes, std::size_t alignment, Deadline deadline);
  // Collective. No rank may use the allocation any more, on any rank; returns when all have called.
  void release(std::size_t offset, Deadline deadline);
  // Takes this rank's place in the next allocate() or release(), for a caller whose own checks
  // failed: the others raise Mismatch with `why`.
  void refuse(std::string_view op, std::string_view why);
  std::size_t used() const;
  // A rank's data, its signal page, as addresses of this process (CUDA: device addresses).
  std::byte* data(int rank) const;
  std::byte* signal_page(int rank) const;

  // --- order between ranks, from the host. On CUDA memory the caller first waits for its stream.
  // Collective: returns when every rank has called it; writes before it are seen after it.
  void barrier(Deadline deadline);
  // Raises this rank's counter of `channel` on `peer` by one: writes before it are seen by the wait
  // it matches. The n-th wait for (source, channel) returns after the n-th put. Never waits.
  void put_signal(int peer, int channel);
  void wait_signal(int source, int channel, Deadline deadline);

  // --- life
  void abort(std::string_view why) noexcept;  // wakes every waiter, on every rank
  void close() noexcept;
  bool closed() const;
  std::string failure() const;  // empty while usable

 private:
  SymmetricMemory(std::shared_ptr<shm::Communicator> group, std::shared_ptr<Backing> backing,
                  std::shared_ptr<HostBacking> file, std::shared_ptr<Peers> peers, std::string name,
                  std::uint64_t generation, std::chrono::milliseconds timeout);
  std::string where() const;
  void check_usable(const char* what) const;

  const std::shared_ptr<shm::Communicator> group_;
  const std::shared_ptr<Backing> backing_;
  const std::shared_ptr<HostBacking> file_;  // the signals', and the data's on the host
  const std::string name_;
  const std::uint64_t generation_;
  const std::chrono::milliseconds timeout_;
  const int rank_;
  const std::uint32_t fork_generation_;
  const std::shared_ptr<Peers> peers_;
  Signals signals_;
  std::atomic<bool> closed_{false};
  mutable std::mutex allocator_mutex_;
  OffsetAllocator allocator_;
};

}  // namespace pyparallel::symmetric
