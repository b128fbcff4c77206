// One rank's seat in one NCCL group: ownership, deadlines and checks around the library's handle.
//
// Streams: data calls are put on the caller's stream and return before the work is done, as in
// NCCL. Threads: calls on one communicator from several threads are safe and run one at a time;
// abort() may come from any thread at any time, also while another is stuck inside the library.
// Failures: a call that the library fails for good, a state that its watchdog finds, a deadline
// that passes: each breaks the communicator, and every later call throws Aborted with the first
// reason. Ends: close() finishes what was started, then destroys, or aborts at its deadline;
// abort() does not wait for peers; the destructor hands the handle to a background thread that
// aborts it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "nccl/call_mutex.h"
#include "nccl/config.h"
#include "nccl/error.h"
#include "nccl/library.h"
#include "nccl/types.h"

namespace pyparallel::nccl {

class Watch;
class Watchdog;
struct Operation;

struct Options {
  std::string name = "world";                // for messages
  std::chrono::milliseconds timeout{30000};  // of every wait, and of launched work when watched
  // Unset: non-blocking where the library can (2.14.3), so that every wait of ours has a deadline.
  // Blocking: what waits for other ranks (init, split, finalize, ...) runs on a helper thread that
  // is left at the deadline; a data call that is stuck inside the library is ended by aborting.
  std::optional<bool> blocking;
  bool watch = true;  // launched work that outlives the timeout is a failure (needs a driver)
  bool abort_on_error = true;  // false: a failure is recorded only, and shrink(abort) may follow
  Config config = {};
  // Who is missing, where something outside the library knows: ends the text of a timeout. Called
  // on a thread of its own, for a short time. Not inherited by what is made out of a communicator.
  std::function<std::string()> explain = nullptr;
};

struct Block {
  void* data = nullptr;
  std::size_t count = 0;  // elements
};
struct ConstBlock {
  const void* data = nullptr;
  std::size_t count = 0;
};

// A reduction that multiplies each rank's input by that rank's factor. Belongs to one communicator;
// may be dropped as soon as the call that got it has returned.
class PreMulSum;
class Window;

// What the library holds on the device, in bytes.
struct MemoryStats {
  std::uint64_t suspendable = 0;  // given back by suspend()
  std::uint64_t persistent = 0;
  std::uint64_t total = 0;
  bool suspended = false;
};

struct Reduction {
  ReduceOp op = ReduceOp::sum;
  std::shared_ptr<PreMulSum> premul_sum;  // with ReduceOp::premul_sum
};

UniqueId make_unique_id(const Library& library);

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // Collective over the `size` holders of the ids (one, or several where CommInitRankScalable
  // exists). The calling thread's current device becomes the communicator's. Throws Timeout when
  // not all ranks come in time.
  static std::shared_ptr<Communicator> init(std::shared_ptr<const Library> library,
                                            const std::vector<UniqueId>& ids, int rank, int size,
                                            const Options& options);
  // What a rank that joins calls while the others are in grow().
  static std::shared_ptr<Communicator> join_grown(std::shared_ptr<const Library> library,
                                                  const UniqueId& id, int rank, int new_size,
                                                  const Options& options);
  // All ranks of a group in this process, one for each device, in that order. Always blocking, and
  // with the library's own settings.
  static std::vector<std::shared_ptr<Communicator>> init_all(std::shared_ptr<const Library> library,
                                                             const std::vector<int>& devices,
                                                             const Options& options);
  ~Communicator();  // never waits

  int rank() const { return rank_; }
  int size() const { return size_; }
  int device() const { return device_; }
  bool blocking() const { return blocking_; }
  const std::string& name() const { return options_.name; }
  const Library& library() const { return *library_; }
  std::shared_ptr<const Library> library_handle() const { return library_; }
  std::chrono::milliseconds timeout() const { return timeout_.load(); }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_.store(timeout); }
  std::uint64_t sequence() const { return sequence_.load(); }  // calls launched so far
  // Throws when not usable. The handle is the library's; this object stays its owner.
  RawComm handle();

  // --- new communicators; collective over this one. Without options they are like this one.
  // color -1: no group, null.
  std::shared_ptr<Communicator> split(int color, int key,
                                      const std::optional<Options>& options = {});
  // Called by the ranks that stay. `abort_work` ends what this communicator has under way first,
  // and is allowed after a failure that was only recorded (Options::abort_on_error false).
  std::shared_ptr<Communicator> shrink(const std::vector<int>& excluded, bool abort_work,
                                       const std::optional<Options>& options = {});
  // Called by all ranks, exactly one of them with the id that it got from grow_id().
  std::shared_ptr<Communicator> grow(int new_size, const std::optional<UniqueId>& id,
                                     const std::optional<Options>& options = {});
  UniqueId grow_id();

  // --- collectives. `in` and `out` are the same array or do not overlap; reduce_scatter,
  // all_gather, gather and scatter may also work in place as NCCL defines it (this rank's part of
  // the larger array). Counts are in elements.
  void all_reduce(const void* in, void* out, std::size_t count, Element, const Reduction&, Stream);
  void reduce(const void* in, void* out, std::size_t count, Element, const Reduction&, int root,
              Stream);
  void broadcast(const void* in, void* out, std::size_t count, Element, int root, Stream);
  // The library's older call for a broadcast in place.
  void bcast(void* data, std::size_t count, Element, int root, Stream);
  void reduce_scatter(const void* in, void* out, std::size_t out_count, Element, const Reduction&,
                      Stream);
  void all_gather(const void* in, void* out, std::size_t in_count, Element, Stream);
  void all_to_all(const void* in, void* out, std::size_t count_per_rank, Element, Stream);
  void gather(const void* in, void* out, std::size_t in_count, Element, int root, Stream);
  void scatter(const void* in, void* out, std::size_t out_count, Element, int root, Stream);
  // Uneven: one block per rank, each alike on all ranks. A grouped call of broadcasts, reductions
  // or sends and receives.
  void reduce_scatter(const std::vector<ConstBlock>& in, void* out, Element, const Reduction&,
                      Stream);
  void all_gather(const void* in, const std::vector<Block>& out, Element, Stream);
  void all_to_all(const std::vector<ConstBlock>& in, const std::vector<Block>& out, Element,
                  Stream);
  void gather(ConstBlock in, const std::vector<Block>& out, Element, int root, Stream);
  void scatter(const std::vector<ConstBlock>& in, Block out, Element, int root, Stream);
  void send(const void* data, std::size_t count, Element, int peer, Stream);
  void recv(void* data, std::size_t count, Element, int peer, Stream);

  // --- one-sided: signals are counted per (source, signal, context), and waited for by number.
  // Writes `data` into the peer's part of the window, `offset` bytes from its start, then signals.
  void put_signal(const void* data, std::size_t count, Element, int peer, const Window& window,
                  std::size_t offset, int signal, int context, Stream);
  void signal(int peer, int signal, int context, Stream);
  // The stream waits until all of these have come.
  void wait_signals(const std::vector<WaitSignalRecord>& waits, Stream);

  // --- pauses
  // Ends what is under way on this rank, also in a thread that is stuck in the library. What is
  // left to do then is split(), shrink(), close() and abort(); data calls throw InvalidUsageError.
  void revoke();
  // Gives the library's memory back to the device until resume(). No other call in between.
  void suspend();
  void resume();
  MemoryStats memory_stats();

  // --- life
  // Finishes what was launched, then destroys. At the deadline it aborts instead and throws
  // Timeout; in both cases the communicator is gone. A second call does nothing.
  void close(Deadline deadline);
  // Ends everything now. Gives false when the library was still at it at the deadline: it goes on
  // in a background thread. Never throws.
  bool abort(const std::string& why, Deadline deadline) noexcept;
  // Empty while usable, else the reason why not.
  std::string failure() const;
  bool closed() const;
  bool revoked() const;
  // What the library says of its background work now; throws what it failed with.
  void check_async();

 private:
  friend class Group;
  friend class Watchdog;
  friend class PreMulSum;
  friend class Registration;
  friend class Window;

  struct Range {
    std::size_t bytes = 0;
    std::function<Result(RawComm)> release;
  };

  Communicator(std::shared_ptr<const Library> library, const Options& options);
  static std::shared_ptr<Communicator> start(
      std::shared_ptr<const Library> library, const Options& options, const std::string& text,
      const std::function<Result(RawComm*, ConfigRecord*)>& call);
  // Takes over a handle: waits until the library has finished making it, asks who we are, watches
  // it.
  void adopt(RawComm handle, const std::string& text, Deadline deadline);
  // `call` makes a handle out of `parent` (null for the ranks that grow() adds).
  using MakeHandle = std::function<Result(RawComm parent, RawComm* made, ConfigRecord* config)>;
  Options child_options(const std::optional<Options>& asked) const;
  std::shared_ptr<Communicator> make_child(const std::string& text,
                                           const std::optional<Options>& asked, bool after_failure,
                                           const MakeHandle& call);

  std::string where() const;  // "communicator tp (rank 1 of 4, device 0)"
  Deadline deadline() const { return Deadline::after(timeout_.load()); }
  void require_usable(bool after_failure = false) const;
  // Records the first reason. Gives whether this was it.
  bool fail(Status status, const std::string& why) noexcept;
  [[noreturn]] void throw_failure() const;
  // Polls until the library is done with what `handle` was told, or the deadline.
  void settle(RawComm handle, const std::string& text, Deadline deadline);
  // Turns the result of a call into success or an exception.
  void finish(Result result, RawComm handle, const std::string& text, Deadline deadline);
  // Locks calls_, or throws Timeout; then checks that the communicator is usable.
  std::unique_lock<CallMutex> enter(const std::string& text, Deadline deadline,
                                    bool after_failure = false);
  // Aborts in the background, unless failures are only to be recorded.
  void end_after_failure() noexcept;
  void watchdog_tick() noexcept;
  std::string explained(const std::string& what) const;
  void release_pending(RawComm handle) noexcept;
  void release_all(RawComm handle) noexcept;
  RawComm take_handle() noexcept;

  // Ranges of memory that the library knows. claim() throws when the range overlaps one that is
  // there.
  std::uintptr_t claim(std::map<std::uintptr_t, Range>& ranges, void* data, std::size_t bytes,
                       const char* what);
  void unclaim(std::map<std::uintptr_t, Range>& ranges, std::uintptr_t first, bool wait);
  bool claimed(const std::map<std::uintptr_t, Range>& ranges, std::uintptr_t first) const;

  void check_call(const void* in, const void* out, std::size_t in_bytes, std::size_t out_bytes,
                  std::size_t in_place_offset, const char* what) const;
  void check_rank(int rank, const char* role, const char* what) const;
  void check_signal(int signal, int context, const char* what) const;
  // Throws InvalidUsageError while revoked or suspended.
  void require_running(const std::string& what) const;
  void check_blocks(std::size_t blocks, const char* what) const;
  Element movable(Element element) const;
  RedOp reduction_of(const Reduction&, const Element&, const char* what) const;
  void submit(Stream stream, std::string text, std::function<Result(RawComm)> call);
  // Hands the calls to the library, in a group of its own when there are several.
  // `simulation` gets the library's estimate instead: then nothing is launched.
  static void launch(std::vector<Operation>& operations, SimulationRecord* simulation = nullptr);

  const std::shared_ptr<const Library> library_;
  Options options_;
  int rank_ = 0, size_ = 0, device_ = 0;
  bool blocking_ = false;
  const std::uint32_t fork_generation_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<std::uint64_t> sequence_{0};

  CallMutex calls_;  // held while a thread is inside the library with this handle
  // Held for moments: the fields below. Taken after calls_, never the other way round.
  mutable std::mutex state_;
  RawComm handle_ = nullptr;
  bool closed_ = false;
  enum class Pause : std::uint8_t { none, revoked, suspended } pause_ = Pause::none;
  std::atomic<bool> failed_{false};
  Status failure_status_ = Status::aborted;
  std::string failure_;
  std::vector<std::function<Result(RawComm)>> pending_;   // releases that await the next call
  std::map<std::uintptr_t, Range> registered_, windows_;  // by first byte
  std::shared_ptr<Watch> watch_;
  bool unsettled_ = false;  // under calls_: a wait for the library was interrupted
};

class PreMulSum {
 public:
  // `factor` is this rank's; the element type is that of the calls to come.
  static std::shared_ptr<PreMulSum> make(const std::shared_ptr<Communicator>& communicator,
                                         double factor, Element element);
  ~PreMulSum();  // never waits
  RedOp op() const { return op_; }
  DataType type() const { return type_; }
  bool belongs_to(const Communicator& communicator) const {
    return owner_.lock().get() == &communicator;
  }

 private:
  PreMulSum() = default;
  std::weak_ptr<Communicator> owner_;
  RedOp op_ = RedOp::sum;
  DataType type_ = DataType::f32;
};

// At the end of the process: communicators that are dropped from now on are left to the operating
// system, and aborts under way get until the deadline.
void process_ends(Deadline deadline) noexcept;

}  // namespace pyparallel::nccl
