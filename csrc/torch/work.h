// What an asynchronous call of the backend returns to torch.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "shm/communicator.h"
#include "torch/call_batch.h"
#include "torch/finisher.h"
#include "torch/tensors.h"

namespace pyparallel::dist {

// Tensors that a future of the call gives: one list, or one list per output.
using Outputs = std::vector<std::vector<at::Tensor>>;

// Common to all: waiting that ends on Ctrl-C and at the caller's own timeout, and a future that is
// made when it is first asked for.
class BaseWork : public c10d::Work {
 public:
  BaseWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
           Outputs outputs, std::uint64_t sequence);

  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

 protected:
  // Finishes once; later calls are ignored.
  void complete(std::exception_ptr error);
  bool is_complete() const;

 private:
  void settle(c10::ivalue::Future& future) const;

  const Outputs outputs_;
  const std::uint64_t sequence_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by mutex_
};

// A collective on the communicator's worker thread. A call that is dropped unrun (the communicator
// was closed) finishes with Closed.
class QueuedWork : public BaseWork {
 public:
  using BaseWork::BaseWork;
  // Waiting, also by a future, first queues the batch that this call was collected in.
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  void collected_in(const std::shared_ptr<CallBatch>& batch) { batch_ = batch; }
  void run(const std::function<void()>& call);
  void drop();

 private:
  void leave_batch();
  std::weak_ptr<CallBatch> batch_;  // which may own this work
};

// Keeps the memory of messages whose Work was dropped while they were still under way.
class Orphans {
 public:
  void adopt(std::shared_ptr<shm::Work> started, Dense data);
  void sweep();  // lets go of those that are done

 private:
  std::mutex mutex_;
  std::vector<std::pair<std::shared_ptr<shm::Work>, Dense>> messages_;
};

// A send or a receive.
class MessageWork : public BaseWork {
 public:
  // `started` was begun on data's memory. `timeout` is that of a wait() which names none.
  MessageWork(int rank, c10d::OpType type, const char* title, const at::Tensor& tensor, Dense data,
              std::shared_ptr<shm::Work> started, std::chrono::milliseconds timeout,
              std::shared_ptr<Orphans> orphans, std::shared_ptr<Finisher> finisher);
  ~MessageWork() override;

  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override;
  int sourceRank() const override { return started_->source(); }
  // From now on the message has the deadline of a wait that begins now.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void finish(Deadline deadline);                             // waits; with finishing_ held
  bool finished_without_waiting(const Deadline& time_limit);  // past it: with Timeout

  Dense data_;
  const std::shared_ptr<shm::Work> started_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Orphans> orphans_;
  const std::shared_ptr<Finisher> finisher_;
  std::mutex finishing_;
};

// The calls between startCoalescing and endCoalescing.
class BatchWork : public BaseWork {
 public:
  BatchWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts,
            std::shared_ptr<Finisher> finisher);

  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
  const std::shared_ptr<Finisher> finisher_;
};

}  // namespace pyparallel::dist
