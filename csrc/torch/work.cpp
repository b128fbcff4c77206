#include "torch/work.h"

#include <algorithm>

#include "base/error.h"
#include "base/interrupt.h"

namespace pyparallel::dist {
namespace {

constexpr std::chrono::milliseconds interrupt_interval(50);

Outputs one_list(const at::Tensor& tensor) { return {{tensor}}; }

}  // namespace

BaseWork::BaseWork(int rank, c10d::OpType type, const char* title,
                   const std::vector<at::Tensor>& inputs, Outputs outputs, std::uint64_t sequence)
    : Work(rank, type, title, title != nullptr ? std::optional(inputs) : std::nullopt),
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

void QueuedWork::leave_batch() {
  if (const auto batch = batch_.lock()) batch->submit();
}

bool QueuedWork::wait(std::chrono::milliseconds timeout) {
  leave_batch();
  return BaseWork::wait(timeout);
}

c10::intrusive_ptr<c10::ivalue::Future> QueuedWork::getFuture() {
  leave_batch();
  return BaseWork::getFuture();
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
                         std::chrono::milliseconds timeout, std::shared_ptr<Orphans> orphans,
                         std::shared_ptr<Finisher> finisher)
    : BaseWork(rank, type, title, {tensor}, one_list(tensor), 0),
      data_(std::move(data)),
      started_(std::move(started)),
      timeout_(timeout),
      orphans_(std::move(orphans)),
      finisher_(std::move(finisher)) {}

MessageWork::~MessageWork() {
  if (!is_complete() && !started_->done()) orphans_->adopt(started_, std::move(data_));
}

void MessageWork::finish(Deadline deadline) {
  if (is_complete()) return;
  try {
    started_->wait(deadline);
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
  if (!is_complete()) {
    const std::lock_guard<std::mutex> lock(finishing_);
    finish(Deadline::after(limited ? timeout : timeout_));
  }
  return BaseWork::wait(kNoTimeout);
}

bool MessageWork::isCompleted() {
  if (is_complete()) return true;
  if (!started_->done()) return false;
  const std::lock_guard<std::mutex> lock(finishing_);
  finish(Deadline::after(timeout_));
  return true;
}

bool MessageWork::finished_without_waiting(const Deadline& time_limit) {
  if (is_complete()) return true;
  if (!started_->done() && !time_limit.expired()) return false;
  const std::unique_lock<std::mutex> lock(finishing_, std::try_to_lock);
  if (!lock.owns_lock()) return false;  // somebody waits, with a deadline of their own
  finish(time_limit);
  return is_complete();
}

c10::intrusive_ptr<c10::ivalue::Future> MessageWork::getFuture() {
  auto future = BaseWork::getFuture();
  if (!isCompleted()) {
    finisher_->add([self = c10::intrusive_ptr<MessageWork>::unsafe_reclaim_from_nonowning(this),
                    time_limit = Deadline::after(timeout_)] {
      return self->finished_without_waiting(time_limit);
    });
  }
  return future;
}

BatchWork::BatchWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts,
                     std::shared_ptr<Finisher> finisher)
    : BaseWork(rank, c10d::OpType::COALESCED, nullptr, {}, {}, 0),
      parts_(std::move(parts)),
      finisher_(std::move(finisher)) {}

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
  for (const auto& part : parts_) part->getFuture();  // each ends by its own deadline from now on
  const auto finished = [self =
                             c10::intrusive_ptr<BatchWork>::unsafe_reclaim_from_nonowning(this)] {
    if (!self->isCompleted()) return false;
    try {
      self->wait(kNoTimeout);
    } catch (...) {
      self->complete(std::current_exception());
    }
    return true;
  };
  if (!finished()) finisher_->add(finished);
  return BaseWork::getFuture();
}

}  // namespace pyparallel::dist
