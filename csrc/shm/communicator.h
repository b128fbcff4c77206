// The CPU communicator: collectives and send/recv between the ranks of one host over shared memory.
//
// Who must call: every rank of the group calls every collective, in the same order, with matching
// arguments; a misfit raises on every rank and leaves the group usable. Send/recv are matched by
// (source, tag) and are not ordered with the collectives.
// Failures: any wait ends by its deadline. A timeout, a lost peer or abort() breaks the group:
// every rank's current and later calls raise the first reason. Threads: calls on one communicator
// from several threads are safe and run one at a time (send/recv concurrently); several
// communicators are independent.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/deadline.h"
#include "base/dtype.h"

namespace pyparallel::shm {

// What ranks need to find each other: made by one, carried to the others by any means, secret to
// them. 128 bytes, the size of NCCL's, so that a framework can carry both alike.
struct UniqueId {
  static constexpr std::size_t size = 128;
  std::array<std::uint8_t, size> bytes{};

  static UniqueId random();
};

struct Block {
  void* data = nullptr;
  std::size_t count = 0;  // elements
};
struct ConstBlock {
  const void* data = nullptr;
  std::size_t count = 0;
};

struct Reduction {
  ReduceOp op = ReduceOp::sum;
  double factor = 1.0;  // premul_sum only; may differ between ranks
};

struct Options {
  std::string name = "world";                // for messages
  std::chrono::milliseconds timeout{30000};  // of calls that name none
};

// One started call: a queued collective, a send or a receive.
class Work {
 public:
  virtual ~Work() = default;  // never waits; an unfinished call goes on
  virtual bool done() const = 0;
  // Returns when done; throws what the call threw, or Timeout when the deadline comes first.
  virtual void wait(Deadline deadline) = 0;
  virtual int source() const { return -1; }  // of a finished receive: whose message it was
  // Takes back a receive that has no message yet: then it is done, and true is given. False when a
  // message has begun to come, and of what cannot be taken back.
  virtual bool cancel() { return false; }
};

// One rank's seat in one group. close() may be called twice; the destructor never waits or throws.
class Communicator {
 public:
  static constexpr int any_source = -1;

  // Collective over the `size` ranks that hold `id`; an id serves one group once. Throws Timeout
  // naming the absent ranks, InvalidArgument, NoMemory (needed and free bytes).
  static std::shared_ptr<Communicator> join(const UniqueId& id, int rank, int size,
                                            const Options& options);
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;
  virtual std::chrono::milliseconds timeout() const = 0;
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  // Number of collectives this rank has started, refused ones included.
  virtual std::uint64_t sequence() const = 0;

  // --- collectives. `in` and `out` are the same array (in place) or do not overlap. Counts are in
  // elements; zero is allowed everywhere. Arrays of blocks have size() entries, one per rank.
  virtual void all_reduce(const void* in, void* out, std::size_t count, DType, Reduction,
                          Deadline) = 0;
  // `out` is written on the root only and ignored elsewhere.
  virtual void reduce(const void* in, void* out, std::size_t count, DType, Reduction, int root,
                      Deadline) = 0;
  // in[r]: what goes to rank r; counts alike on all ranks; out has in[rank()].count elements.
  virtual void reduce_scatter(const ConstBlock* in, void* out, DType, Reduction, Deadline) = 0;
  // out[r]: receives rank r's `in`; counts alike on all ranks; in has out[rank()].count elements.
  virtual void all_gather(const void* in, const Block* out, DType, Deadline) = 0;
  // in[r] goes to rank r, out[r] comes from rank r; my in[r].count is r's out[me].count.
  virtual void all_to_all(const ConstBlock* in, const Block* out, DType, Deadline) = 0;
  virtual void broadcast(void* data, std::size_t count, DType, int root, Deadline) = 0;
  // in[r] on the root goes to rank r's out. `in` is ignored elsewhere. Counts may differ.
  virtual void scatter(const ConstBlock* in, Block out, DType, int root, Deadline) = 0;
  virtual void gather(ConstBlock in, const Block* out, DType, int root, Deadline) = 0;
  virtual void barrier(Deadline) = 0;
  // Says more of this thread's next collective: `text` is compared between ranks as its counts are,
  // and shown where it differs. For calls of a higher level, whose sizes the core does not see.
  virtual void note(std::string_view text) = 0;
  // Takes this rank's place in the next collective without taking part: for a caller whose own
  // argument checks failed. The other ranks raise Mismatch with `why`; this one returns at once.
  virtual void refuse(std::string_view op, std::string_view why) = 0;

  // Runs `call` (which calls collectives of this communicator) on its worker thread, after what was
  // queued before; collectives called meanwhile on other threads come after it. The caller keeps
  // the arrays alive.
  virtual std::shared_ptr<Work> enqueue(std::function<void()> call) = 0;

  // --- point to point. Buffered up to what fits, never blocked by the receiver's own sends. A
  // receive takes the oldest message of its (source, tag); the count and dtype must be the
  // sender's.
  virtual void send(const void* data, std::size_t count, DType, int destination, std::int64_t tag,
                    Deadline) = 0;
  // Gives the source, which is `source` unless that was any_source.
  virtual int recv(void* data, std::size_t count, DType, int source, std::int64_t tag,
                   Deadline) = 0;
  virtual std::shared_ptr<Work> isend(const void* data, std::size_t count, DType, int destination,
                                      std::int64_t tag) = 0;
  virtual std::shared_ptr<Work> irecv(void* data, std::size_t count, DType, int source,
                                      std::int64_t tag) = 0;

  // --- life
  // Collective: ranks of one color form a new group, ordered by (key, rank). color -1: no group
  // (nullptr).
  virtual std::shared_ptr<Communicator> split(int color, int key, const Options& options) = 0;
  // Wakes every waiter of the group on every rank; they raise Aborted with `why`.
  virtual void abort(std::string_view why) noexcept = 0;
  // Leaves the group. Never waits; peers that wait for this rank raise PeerLost.
  virtual void close() noexcept = 0;
  // Empty while usable, else the reason why not.
  virtual std::string failure() const = 0;
  // Process id of a rank (0 where it is in another pid namespace).
  virtual int pid_of(int rank) const = 0;
};

}  // namespace pyparallel::shm
