#include "torch/work.h"

#include <ATen/record_function.h>

#include <algorithm>

#include "base/error.h"
#include "base/interrupt.h"

namespace pyparallel::dist {
namespace {

constexpr std::chrono::milliseconds interrupt_interval(50);

Outputs one_list(const at::Tensor& tensor) { return {{tensor}}; }

}  // namespace

const char* title_if_profiling(const char* title) { return at::hasCallbacks() ? title : nullptr; }

BaseWork::BaseWork(int rank, c10d::OpType type, const char* title,
                   const std::vector<at::Tensor>& inputs, Outputs outputs, std::uint64_t sequence)
    : Work(rank, type, title_if_profiling(title),
           title_if_profiling(title) ? std::optional(inputs) : std::nullopt),
      outputs_(std::move(outputs)),
      sequence_(sequence) {}

bool BaseWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool limited = timeout != kNoTimeout && timeout != c10d::kUnsetTimeout;
  const Deadline deadline = Deadline::after(limited ? timeout : std::chrono::hours(24 * 365));
  while (!completed_) {
    // Never long: the call itself has a deadline, this thread only has to notice Ctrl-C.
    const auto slice = std::min<Deadline::Duration>(interrupt_interval, deadline.remaining());
    if (cv_.wait_for(lock, slice, [this] { return completed_; })) break;
    if (limited && deadline.expired()) {
      throw Timeout(str(c10d::opTypeToString(opType_), " #", sequence_, ", rank ", rank_,
                        ": not done ", deadline.timeout_seconds(),
                        " s after wait() began; the call goes on"));
    }
    lock.unlock();
    if (interrupt_requested()) throw Interrupted("a signal ended the wait; the call goes on");
    lock.lock();
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

std::vector<at::Tensor> BaseWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& list : outputs_) all.insert(all.end(), list.begin(), list.end());
  return all;
}

bool BaseWork::is_complete() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_;
}

void BaseWork::settle(c10::ivalue::Future& future) const {
  if (exception_) {
    future.setError(exception_);
  } else if (outputs_.size() > 1) {
    future.markCompleted(c10::IValue(outputs_));
  } else {
    future.markCompleted(
        c10::IValue(outputs_.empty() ? std::vector<at::Tensor>() : outputs_.front()));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> BaseWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool finished = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!future_) {
      const c10::TypePtr list = c10::ListType::create(c10::TensorType::get());
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          outputs_.size() > 1 ? c10::ListType::create(list) : list);
      finished = completed_;
    }
    future = future_;
  }
  if (finished) settle(*future);
  return future;
}

void BaseWork::complete(std::exception_ptr error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (completed_) return;
    completed_ = true;
    exception_ = std::move(error);
    future = future_;
    if (recordFunctionEndCallback_) {
      recordFunctionEndCallback_();
      recordFunctionEndCallback_ = nullptr;
    }
  }
  cv_.notify_all();
  if (future) settle(*future);
}

void QueuedWork::run(const std::function<void()>& call) {
  try {
    call();
  } catch (...) {
    complete(std::current_exception());
    return;
  }
  complete(nullptr);
}

void QueuedWork::drop() {
  complete(std::make_exception_ptr(
      Closed(str(c10d::opTypeToString(opType_), " #", getSequencenumber(), ", rank ", rank_,
                 ": the communicator was closed before the queued call ran"))));
}

void Orphans::adopt(std::shared_ptr<shm::Work> started, Dense data) {
  const std::lock_guard<std::mutex> lock(mutex_);
  messages_.emplace_back(std::move(started), std::move(data));
}

void Orphans::sweep() {
  const std::lock_guard<std::mutex> lock(mutex_);
  messages_.erase(std::remove_if(messages_.begin(), messages_.end(),
                                 [](const auto& message) { return message.first->done(); }),
                  messages_.end());
}

MessageWork::MessageWork(int rank, c10d::OpType type, const char* title, const at::Tensor& tensor,
                         Dense data, std::shared_ptr<shm::Work> started,
                         std::chrono::milliseconds timeout, std::shared_ptr<Orphans> orphans)
    : BaseWork(rank, type, title, {tensor}, one_list(tensor), 0),
      data_(std::move(data)),
      started_(std::move(started)),
      timeout_(timeout),
      orphans_(std::move(orphans)) {}

MessageWork::~MessageWork() {
  if (!is_complete() && !started_->done()) orphans_->adopt(started_, std::move(data_));
}

void MessageWork::finish_with(shm::Work& started, Deadline deadline) {
  const std::lock_guard<std::mutex> lock(finishing_);
  if (is_complete()) return;
  try {
    started.wait(deadline);
    data_.write_back();
  } catch (const Interrupted&) {
    throw;  // ended the wait, not the message
  } catch (...) {
    complete(std::current_exception());
    return;
  }
  complete(nullptr);
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  const bool limited = timeout != kNoTimeout && timeout != c10d::kUnsetTimeout;
  if (!is_complete()) finish_with(*started_, Deadline::after(limited ? timeout : timeout_));
  return BaseWork::wait(kNoTimeout);
}

bool MessageWork::isCompleted() {
  if (is_complete()) return true;
  if (!started_->done()) return false;
  finish_with(*started_, Deadline::after(timeout_));
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> MessageWork::getFuture() {
  if (!isCompleted()) {
    throw Unsupported(
        "a future of an unfinished send or receive: nothing runs in the background that could "
        "complete it; call wait() first, or use the Work itself");
  }
  return BaseWork::getFuture();
}

BatchWork::BatchWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts)
    : BaseWork(rank, c10d::OpType::COALESCED, nullptr, {}, {}, 0), parts_(std::move(parts)) {}

bool BatchWork::wait(std::chrono::milliseconds timeout) {
  const bool limited = timeout != kNoTimeout && timeout != c10d::kUnsetTimeout;
  const Deadline deadline = Deadline::after(limited ? timeout : std::chrono::milliseconds(0));
  for (const auto& part : parts_) {
    if (!limited) {
      part->wait(timeout);
      continue;
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.remaining());
    part->wait(std::max(left, std::chrono::milliseconds(1)));
  }
  complete(nullptr);
  return true;
}

bool BatchWork::isCompleted() {
  for (const auto& part : parts_) {
    if (!part->isCompleted()) return false;
  }
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> BatchWork::getFuture() {
  if (!isCompleted()) {
    throw Unsupported("a future of an unfinished batch of calls: call wait() first");
  }
  wait(kNoTimeout);
  return BaseWork::getFuture();
}

}  // namespace pyparallel::dist
