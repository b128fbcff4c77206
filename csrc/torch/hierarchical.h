// A communicator whose ranks live on several hosts: shared memory inside a host, gloo between the
// leaders (first ranks) of the hosts.
//
// The way of a collective:
//   agree    every rank's record (op, sizes, type, or its refusal) goes to its leader, the leaders
//            compare theirs, the verdict comes back: a misfit raises on every rank of every host
//            and leaves the group usable
//   up       the host's ranks reduce or gather to their leader through shared memory
//   across   the leaders exchange
//   down     the leader shares the result with its host's ranks
// A reduction adds the ranks of a host in rank order, then the hosts in the order of their first
// ranks; 16-bit floats stay fp32 until the one rounding at the end, and the result is computed
// once: the same bits on every rank and in every run. Failures: what breaks between hosts aborts
// each host's group with the reason; a host whose leader fails closes its connections, which the
// other leaders notice.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "shm/communicator.h"
#include "shm/note.h"
#include "torch/cross_messages.h"
#include "torch/group.h"
#include "torch/links.h"
#include "torch/rendezvous.h"
#include "torch/worker.h"

namespace pyparallel::dist {

class HierarchicalCommunicator final
    : public shm::Communicator,
      public std::enable_shared_from_this<HierarchicalCommunicator> {
 public:
  // Collective over the ranks of the topology, which has at least two hosts.
  static std::shared_ptr<shm::Communicator> join(const Seat& seat, const Topology& topology,
                                                 const GlooFactory& gloo, Deadline deadline);
  HierarchicalCommunicator(Seat seat, Topology topology, GlooFactory gloo,
                           std::shared_ptr<shm::Communicator> local);
  ~HierarchicalCommunicator() override { close(); }

  int rank() const override { return seat_.rank; }
  int size() const override { return seat_.size; }
  const std::string& name() const override { return seat_.group; }
  std::chrono::milliseconds timeout() const override {
    return std::chrono::milliseconds(timeout_ms_.load());
  }
  void set_timeout(std::chrono::milliseconds timeout) override { timeout_ms_ = timeout.count(); }
  std::uint64_t sequence() const override { return sequence_.load(); }

  // --- hierarchical_reductions.cpp
  void all_reduce(const void* in, void* out, std::size_t count, DType dtype,
                  shm::Reduction reduction, Deadline deadline) override;
  void reduce(const void* in, void* out, std::size_t count, DType dtype, shm::Reduction reduction,
              int root, Deadline deadline) override;
  void reduce_scatter(const shm::ConstBlock* in, void* out, DType dtype, shm::Reduction reduction,
                      Deadline deadline) override;
  // --- hierarchical_moves.cpp
  void all_gather(const void* in, const shm::Block* out, DType dtype, Deadline deadline) override;
  void all_to_all(const shm::ConstBlock* in, const shm::Block* out, DType dtype,
                  Deadline deadline) override;
  void broadcast(void* data, std::size_t count, DType dtype, int root, Deadline deadline) override;
  void scatter(const shm::ConstBlock* in, shm::Block out, DType dtype, int root,
               Deadline deadline) override;
  void gather(shm::ConstBlock in, const shm::Block* out, DType dtype, int root,
              Deadline deadline) override;
  // --- hierarchical.cpp
  void barrier(Deadline deadline) override;
  void note(std::string_view text) override { shm::leave_note(this, text); }
  void refuse(std::string_view op, std::string_view why) override;
  std::shared_ptr<shm::Work> enqueue(std::function<void()> call) override;

  void send(const void* data, std::size_t count, DType dtype, int destination, std::int64_t tag,
            Deadline deadline) override;
  int recv(void* data, std::size_t count, DType dtype, int source, std::int64_t tag,
           Deadline deadline) override;
  std::shared_ptr<shm::Work> isend(const void* data, std::size_t count, DType dtype,
                                   int destination, std::int64_t tag) override;
  std::shared_ptr<shm::Work> irecv(void* data, std::size_t count, DType dtype, int source,
                                   std::int64_t tag) override;

  std::shared_ptr<shm::Communicator> split(int color, int key,
                                           const shm::Options& options) override;
  void abort(std::string_view why) noexcept override;
  void close() noexcept override;
  std::string failure() const override;
  int pid_of(int rank) const override;

 private:
  enum class Op : std::uint8_t {
    all_reduce,
    reduce,
    reduce_scatter,
    all_gather,
    all_to_all,
    broadcast,
    scatter,
    gather,
    barrier,
    refused,
  };
  // What all ranks must agree on.
  struct Call {
    Op op = Op::barrier;
    DType dtype = DType::u8;
    ReduceOp reduction = ReduceOp::sum;
    int root = -1;
    std::uint64_t count = 0;   // 0 where ranks may differ
    std::uint64_t digest = 0;  // of the list of counts, where ranks must have the same
  };
  struct Record;
  using Counts = std::vector<std::int64_t>;

  // Runs check() and then, if all ranks agree, body(), on the worker; waits for its end.
  void collective(const Call& call, Deadline deadline, const std::function<void()>& check,
                  const std::function<void()>& body);
  void on_worker(const std::function<void()>& call);
  void agree(const Record& mine, Deadline deadline);
  Record compare(const std::vector<Record>& records) const;
  // Leaders: the whole table, one row per rank in rank order; others: empty. Rows are equally long.
  std::vector<Counts> exchange_counts(const Counts& mine, Deadline deadline);
  // The leaders' common finding about the counts: empty, or every rank throws Mismatch with it.
  void share_finding(const std::string& finding, Deadline deadline);
  static const char* name_of_op(Op op);
  static std::uint64_t digest_of(const Counts& counts);
  std::string describe(const Record& record) const;
  std::string here(const char* op) const;  // "all_reduce #7, group world, rank 2"

  bool is_leader() const { return links_ != nullptr; }
  int hosts() const { return static_cast<int>(topology_.hosts.size()); }
  const std::vector<int>& ranks_of(int host) const {
    return topology_.hosts[static_cast<std::size_t>(host)];
  }
  const std::vector<int>& local_ranks() const { return ranks_of(host_); }
  int host_of(int rank) const { return topology_.host_of[static_cast<std::size_t>(rank)]; }
  bool is_local(int rank) const { return host_of(rank) == host_; }
  int local_index(int rank) const;
  void check_rank(const char* what, int rank) const;
  void transfer(const std::vector<Links::Transfer>& sends,
                const std::vector<Links::Transfer>& receives, Deadline deadline);
  // From the leader to `rank` of this host, or back; the other ranks do nothing.
  void hand_down(void* data, std::size_t bytes, int rank, Deadline deadline);
  void hand_up(void* data, std::size_t bytes, int rank, Deadline deadline);

  void reduce_on_host(const void* in, void* partial, std::size_t count, DType dtype,
                      shm::Reduction reduction, Deadline deadline);
  void combine_hosts(const std::vector<const void*>& partials, void* out, std::size_t count,
                     DType dtype, ReduceOp op) const;

  // A scatter or gather, once all agree. `begin` (one more than hosts) and `total` are bytes of the
  // root's array, packed host by host; known to the root and the leaders. `rows`: to the leaders.
  struct Rooted {
    std::vector<Counts> rows;
    std::vector<std::size_t> begin;
    std::size_t total = 0;
    std::size_t size_of_host(int host) const {
      return begin[static_cast<std::size_t>(host) + 1] - begin[static_cast<std::size_t>(host)];
    }
  };
  Rooted agree_with_root(std::size_t own, const Counts& at_root, int root, DType dtype,
                         Deadline deadline);
  std::vector<shm::Block> blocks_of_host(const at::Tensor& own, const Rooted& rooted,
                                         DType dtype) const;
  void exchange_pieces(const at::Tensor& packed, const at::Tensor& own, const Rooted& rooted,
                       int root, bool to_root, Deadline deadline);
  std::vector<int> host_order() const;
  std::string check_exchange(const std::vector<Counts>& rows) const;
  std::string check_root_counts(const std::vector<Counts>& rows, int root) const;
  void exchange_on_host(const shm::ConstBlock* in, const shm::Block* out, DType dtype,
                        Deadline deadline);
  void exchange_between_hosts(const shm::ConstBlock* in, const shm::Block* out, DType dtype,
                              const std::vector<Counts>& rows, Deadline deadline);
  void cross(const std::vector<at::Tensor>& ups, const std::vector<at::Tensor>& downs,
             const std::function<std::size_t(int, int)>& bytes_between, Deadline deadline);

  void fail(const Error& error) noexcept;
  void throw_if_failed() const;

  const Seat seat_;
  const Topology topology_;
  const GlooFactory gloo_;
  const int host_;
  const std::shared_ptr<shm::Communicator> local_;
  std::unique_ptr<Links> links_;  // of a leader
  std::shared_ptr<CrossMessages> messages_;
  std::atomic<std::chrono::milliseconds::rep> timeout_ms_;
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<const char*> running_{"a collective"};  // what the worker does
  mutable std::mutex failure_mutex_;
  Status failure_status_ = Status::ok;
  std::string failure_;
  Worker worker_;
};

}  // namespace pyparallel::dist
