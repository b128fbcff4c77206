#include "torch/nccl_work.h"

#include <thread>

#include "base/error.h"
#include "base/interrupt.h"

namespace pyparallel::dist {

NcclWork::NcclWork(int rank, c10d::OpType type, const char* title,
                   const std::vector<at::Tensor>& inputs, Facts facts, const DeviceStreams& streams,
                   c10::Stream stream)
    : c10d::Work(rank, type, title, inputs),
      facts_(std::move(facts)),
      streams_(streams),
      end_(streams_, stream) {
  std::vector<c10::Device> devices;
  if (streams_.asynchronous()) devices.push_back(facts_.device);
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     devices);
  // Done as far as the host goes; whoever uses the value on a device waits for this stream.
  const c10::StreamGuard guard(stream);
  std::vector<at::Tensor> flat;
  for (const auto& list : facts_.outputs) flat.insert(flat.end(), list.begin(), list.end());
  future_->markCompleted(c10::IValue(std::move(flat)));
}

void NcclWork::throw_if_failed() const {
  const std::string why = facts_.failure();
  if (!why.empty()) throw Aborted(str(facts_.what, ": ", why));
}

bool NcclWork::isCompleted() { return !facts_.failure().empty() || end_.reached(); }

bool NcclWork::isSuccess() const { return facts_.failure().empty() && end_.reached(); }

bool NcclWork::wait(std::chrono::milliseconds timeout) {
  throw_if_failed();
  end_.before(streams_.current(facts_.device));
  const bool limited = timeout != kNoTimeout && timeout != c10d::kUnsetTimeout;
  if (limited || facts_.waits_on_host) wait_here(limited ? timeout : std::chrono::hours(24 * 365));
  return true;
}

void NcclWork::wait_here(std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  for (auto pause = std::chrono::microseconds(20); !end_.reached();
       pause = std::min(pause * 2, std::chrono::microseconds(2000))) {
    throw_if_failed();
    if (interrupt_requested()) throw Interrupted(str(facts_.what, ": interrupted"));
    if (deadline.expired()) {
      const std::string text = str(facts_.what, ": not done after ", deadline.timeout_seconds(),
                                   " s; ", facts_.absent());
      facts_.abort(text);
      throw Timeout(text);
    }
    std::this_thread::sleep_for(pause);
  }
  throw_if_failed();
}

std::vector<at::Tensor> NcclWork::result() {
  return facts_.outputs.empty() ? std::vector<at::Tensor>() : facts_.outputs.front();
}

}  // namespace pyparallel::dist
