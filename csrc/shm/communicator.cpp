#include "shm/communicator.h"

#include <algorithm>
#include <cstring>

#include "base/env.h"
#include "base/error.h"
#include "base/observer.h"
#include "shm/collectives.h"
#include "shm/group.h"
#include "shm/point_to_point.h"
#include "shm/reduce.h"
#include "shm/turns.h"
#include "shm/worker.h"

namespace pyparallel::shm {
namespace {

class Seat final : public Communicator {
 public:
  Seat(const UniqueId& id, int rank, int size, const Options& options,
       const std::function<void()>& hopeful)
      : timeout_(options.timeout.count()),
        group_(std::make_shared<Group>(id, rank, size, options.name,
                                       Deadline::after(options.timeout), hopeful)),
        collectives_(*group_),
        transfers_(std::make_shared<PointToPoint>(group_)),
        worker_(options.name) {}
  ~Seat() override { close(); }

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  const std::string& name() const override { return group_->name(); }
  std::chrono::milliseconds timeout() const override {
    return std::chrono::milliseconds(timeout_.load());
  }
  void set_timeout(std::chrono::milliseconds timeout) override { timeout_.store(timeout.count()); }
  std::uint64_t sequence() const override { return group_->sequence(); }

  void all_reduce(const void* in, void* out, std::size_t count, DType dtype, Reduction reduction,
                  Deadline deadline) override {
    call(
        Op::all_reduce, deadline,
        [&] {
          check_reduction(dtype, reduction);
          check_array(in, count), check_array(out, count);
        },
        [&] { collectives_.all_reduce(in, out, count, dtype, reduction, deadline); });
  }
  void reduce(const void* in, void* out, std::size_t count, DType dtype, Reduction reduction,
              int root, Deadline deadline) override {
    call(
        Op::reduce, deadline,
        [&] {
          check_reduction(dtype, reduction);
          check_root(root);
          check_array(in, count);
          if (rank() == root) check_array(out, count);
        },
        [&] { collectives_.reduce(in, out, count, dtype, reduction, root, deadline); });
  }
  void reduce_scatter(const ConstBlock* in, void* out, DType dtype, Reduction reduction,
                      Deadline deadline) override {
    call(
        Op::reduce_scatter, deadline,
        [&] {
          check_reduction(dtype, reduction);
          for (int r = 0; r < size(); ++r) check_array(in[r].data, in[r].count);
          check_array(out, in[rank()].count);
        },
        [&] { collectives_.reduce_scatter(in, out, dtype, reduction, deadline); });
  }
  void all_gather(const void* in, const Block* out, DType dtype, Deadline deadline) override {
    call(
        Op::all_gather, deadline,
        [&] {
          check_dtype(dtype);
          for (int r = 0; r < size(); ++r) check_array(out[r].data, out[r].count);
          check_array(in, out[rank()].count);
        },
        [&] { collectives_.all_gather(in, out, dtype, deadline); });
  }
  void all_to_all(const ConstBlock* in, const Block* out, DType dtype, Deadline deadline) override {
    call(
        Op::all_to_all, deadline,
        [&] {
          check_dtype(dtype);
          for (int r = 0; r < size(); ++r)
            check_array(in[r].data, in[r].count), check_array(out[r].data, out[r].count);
        },
        [&] { collectives_.all_to_all(in, out, dtype, deadline); });
  }
  void broadcast(void* data, std::size_t count, DType dtype, int root, Deadline deadline) override {
    call(
        Op::broadcast, deadline,
        [&] { check_dtype(dtype), check_root(root), check_array(data, count); },
        [&] { collectives_.broadcast(data, count, dtype, root, deadline); });
  }
  void scatter(const ConstBlock* in, Block out, DType dtype, int root, Deadline deadline) override {
    call(
        Op::scatter, deadline,
        [&] {
          check_dtype(dtype), check_root(root), check_array(out.data, out.count);
          for (int r = 0; rank() == root && r < size(); ++r) check_array(in[r].data, in[r].count);
        },
        [&] { collectives_.scatter(in, out, dtype, root, deadline); });
  }
  void gather(ConstBlock in, const Block* out, DType dtype, int root, Deadline deadline) override {
    call(
        Op::gather, deadline,
        [&] {
          check_dtype(dtype), check_root(root), check_array(in.data, in.count);
          for (int r = 0; rank() == root && r < size(); ++r) check_array(out[r].data, out[r].count);
        },
        [&] { collectives_.gather(in, out, dtype, root, deadline); });
  }
  void barrier(Deadline deadline) override {
    call(Op::barrier, deadline, [] {}, [&] { collectives_.barrier(deadline); });
  }
  void note(std::string_view text) override { leave_note(group_.get(), text); }
  void refuse(std::string_view op, std::string_view why) override {
    const Deadline deadline = Deadline::after(timeout());
    const Turn turn(*this, deadline);
    group_->refuse(op, why, deadline);
  }

  std::shared_ptr<Work> enqueue(std::function<void()> call) override {
    group_->throw_if_unusable();
    return worker_.enqueue(std::move(call));
  }

  void send(const void* data, std::size_t count, DType dtype, int destination, std::int64_t tag,
            Deadline deadline) override {
    const Observed observed("send", name());
    transfers_->wait(*start_send(data, count, dtype, destination, tag), deadline);
  }
  int recv(void* data, std::size_t count, DType dtype, int source, std::int64_t tag,
           Deadline deadline) override {
    const Observed observed("recv", name());
    const auto transfer = start_recv(data, count, dtype, source, tag);
    transfers_->wait(*transfer, deadline);
    return transfer->source();
  }
  std::shared_ptr<Work> isend(const void* data, std::size_t count, DType dtype, int destination,
                              std::int64_t tag) override {
    auto transfer = start_send(data, count, dtype, destination, tag);
    if (!transfer->done()) transfers_->progress_in_background();
    return transfer;
  }
  std::shared_ptr<Work> irecv(void* data, std::size_t count, DType dtype, int source,
                              std::int64_t tag) override {
    auto transfer = start_recv(data, count, dtype, source, tag);
    if (!transfer->done()) transfers_->progress_in_background();
    return transfer;
  }

  std::shared_ptr<Communicator> split(int color, int key, const Options& options) override;

  void abort(std::string_view why) noexcept override {
    group_->fail(Status::aborted, str("group ", name(), ": aborted by rank ", rank(), ": ", why));
  }
  void close() noexcept override {
    // A forked child has nothing to end, and its copies of the locks may be held by threads that
    // it does not have.
    if (group_->forked()) return;
    group_->close();
    transfers_->stop();
    worker_.stop();
  }
  std::string failure() const override { return group_->failure(); }
  int pid_of(int rank) const override {
    PYPARALLEL_REQUIRE(rank >= 0 && rank < size(), "pid_of: rank ", rank, ", expected 0 to ",
                       size() - 1);
    return group_->pid_of(rank);
  }

 private:
  // The right to make the next collective: after all that is queued, one thread at a time.
  class Turn {
   public:
    Turn(Seat& seat, const Deadline& deadline) : turns_(seat.turns_) {
      const bool others_first = !seat.worker_.idle() && !seat.worker_.on_this_thread();
      if (others_first || !turns_.try_begin()) wait(seat, deadline, others_first);
    }
    ~Turn() { turns_.end(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    // The peers make the call that this rank gives up, so its later ones would meet theirs one
    // place off: that breaks the group.
    static void wait(Seat& seat, const Deadline& deadline, bool others_first) {
      try {
        if (others_first) seat.worker_.drain(deadline);
        seat.turns_.begin(deadline, seat.name());
      } catch (const Timeout& error) {
        seat.group_->fail(error.status(), str(error.what(), " (rank ", seat.rank(), ")"));
        seat.group_->throw_if_unusable();
      } catch (const Interrupted& error) {
        seat.group_->fail(Status::aborted,
                          str("group ", seat.name(), ": rank ", seat.rank(),
                              " was interrupted by a signal before a call it had to make"));
        throw;
      }
    }
    Turns& turns_;
  };

  template <typename Check, typename Run>
  void call(Op op, const Deadline& deadline, const Check& check, const Run& run) {
    const Observed observed(name_of(op), name());
    const Turn turn(*this, deadline);
    group_->throw_if_unusable();
    try {
      check();
    } catch (const InvalidArgument& error) {
      group_->refuse(name_of(op), error.what(), deadline);
      throw InvalidArgument(
          str(name_of(op), " on rank ", rank(), ", group ", name(), ": ", error.what()));
    }
    run();
  }

  static void check_dtype(DType dtype) {
    PYPARALLEL_REQUIRE(dtype < DType::count_, "unknown dtype code ", static_cast<int>(dtype));
  }
  static void check_reduction(DType dtype, Reduction reduction) {
    check_dtype(dtype);
    PYPARALLEL_REQUIRE(reduction.op < ReduceOp::count_, "unknown reduction code ",
                       static_cast<int>(reduction.op));
    PYPARALLEL_REQUIRE(is_defined(reduction.op, dtype), "reduction ", name_of(reduction.op),
                       " is not defined on ", name_of(dtype));
  }
  void check_root(int root) const { check_rank("root", root); }
  void check_rank(const char* what, int rank) const {
    PYPARALLEL_REQUIRE(rank >= 0 && rank < size(), what, " ", rank, ", expected 0 to ", size() - 1);
  }
  static void check_array(const void* data, std::size_t count) {
    PYPARALLEL_REQUIRE(data != nullptr || count == 0, "a null array of ", count, " elements");
    PYPARALLEL_REQUIRE(count <= (std::size_t{1} << 56), count,
                       " elements are more than any memory holds");
  }
  std::shared_ptr<PointToPoint::Transfer> start_send(const void* data, std::size_t count,
                                                     DType dtype, int to, std::int64_t tag) {
    check_dtype(dtype), check_rank("send to rank", to), check_array(data, count);
    return transfers_->start_send(data, count, dtype, to, tag);
  }
  std::shared_ptr<PointToPoint::Transfer> start_recv(void* data, std::size_t count, DType dtype,
                                                     int from, std::int64_t tag) {
    check_dtype(dtype), check_array(data, count);
    if (from != any_source) check_rank("recv from rank", from);
    return transfers_->start_recv(data, count, dtype, from, tag);
  }

  std::atomic<std::chrono::milliseconds::rep> timeout_;
  std::shared_ptr<Group> group_;
  Collectives collectives_;
  std::shared_ptr<PointToPoint> transfers_;
  Worker worker_;
  Turns turns_;
};

std::shared_ptr<Communicator> Seat::split(int color, int key, const Options& options) {
  // Each rank tells its color and key, and an id in case it becomes the first of its group.
  struct Entry {
    std::int32_t color;
    std::int32_t key;
    std::uint8_t id[UniqueId::size];
  };
  Entry mine{color, key, {}};
  std::memcpy(mine.id, UniqueId::random().bytes.data(), UniqueId::size);
  std::vector<Entry> entries(size());
  std::vector<Block> blocks(size());
  for (int r = 0; r < size(); ++r) blocks[r] = {&entries[r], sizeof(Entry)};
  all_gather(&mine, blocks.data(), DType::u8, Deadline::after(options.timeout));
  if (color < 0) return nullptr;

  std::vector<int> members;
  for (int r = 0; r < size(); ++r)
    if (entries[r].color == color) members.push_back(r);
  std::stable_sort(members.begin(), members.end(),
                   [&](int a, int b) { return entries[a].key < entries[b].key; });
  UniqueId id;
  std::memcpy(id.bytes.data(), entries[members[0]].id, UniqueId::size);
  const auto place = std::find(members.begin(), members.end(), rank()) - members.begin();
  // A member may die on the way to the new group, where nobody could name it.
  const auto hopeful = [&] {
    // All of them: one that gave up because of another's death may be gone as well.
    std::string dead;
    for (int r : members) {
      if (r == rank() || group_->alive(r)) continue;
      dead += str(dead.empty() ? "" : ", ", "rank ", r, " (pid ", pid_of(r), ")");
    }
    if (!dead.empty()) throw PeerLost(str("split of group ", name(), ": ", dead, " died"));
  };
  return std::make_shared<Seat>(id, static_cast<int>(place), static_cast<int>(members.size()),
                                options, hopeful);
}

}  // namespace

std::shared_ptr<Communicator> Communicator::join(const UniqueId& id, int rank, int size,
                                                 const Options& options) {
  PYPARALLEL_REQUIRE(size <= Layout::max_ranks, "join of group ", options.name, ": ", size,
                     " ranks, at most ", Layout::max_ranks, " share a host's memory");
  PYPARALLEL_REQUIRE(options.timeout.count() > 0, "join of group ", options.name, ": timeout of ",
                     options.timeout.count(), " ms, expected a positive one");
  PYPARALLEL_REQUIRE(size >= 1 && rank >= 0 && rank < size, "join of group ", options.name,
                     ": rank ", rank, " of world size ", size,
                     "; expected a world size of at least 1 and ranks from 0");
  // Settings are checked before peers hear of this rank: it must not join them and then raise alone
  // in the middle of a call.
  env::spin_us();
  simd_name();
  return std::make_shared<Seat>(id, rank, size, options, [] {});
}

}  // namespace pyparallel::shm
