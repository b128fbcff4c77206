#include "torch/call_batch.h"

#include <utility>

#include "base/error.h"

namespace pyparallel::dist {

void CallBatch::open() {
  const std::lock_guard<std::mutex> lock(mutex_);
  PYPARALLEL_REQUIRE(!open_, "group ", group_, ": startCoalescing() twice without endCoalescing()");
  open_ = true;
}

std::vector<CallBatch::Work> CallBatch::close() {
  std::vector<Work> works;
  c10d::Backend* device = nullptr;
  Calls kept;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    PYPARALLEL_REQUIRE(open_, "group ", group_, ": endCoalescing() without startCoalescing()");
    open_ = false;
    works.swap(works_);
    device = std::exchange(device_, nullptr);
    kept = queue();
  }
  if (device != nullptr)
    if (Work work = device->endCoalescing()) works.push_back(std::move(work));
  return works;
}

bool CallBatch::add(const std::function<void()>& call, const Work& work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!open_) return false;
  calls_.push_back(call);
  if (work) works_.push_back(work);
  return true;
}

void CallBatch::add(const Work& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (open_) works_.push_back(message);
}

void CallBatch::enter(c10d::Backend& device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!open_ || device_ != nullptr) return;
  device.startCoalescing();
  device_ = &device;
}

void CallBatch::submit() {
  Calls kept;
  const std::lock_guard<std::mutex> lock(mutex_);
  kept = queue();
}

// With mutex_ held, which orders the calls. The caller lets go of what this gives without it: calls
// that could not be queued end there, and what hears of that may call this group again.
CallBatch::Calls CallBatch::queue() {
  if (calls_.empty()) return nullptr;
  auto calls = std::make_shared<std::vector<std::function<void()>>>(std::exchange(calls_, {}));
  try {
    communicator_->enqueue([calls] {
      for (auto& call : *calls) std::exchange(call, nullptr)();
    });
  } catch (const Error&) {
    // The group is broken or closed: dropped calls say so to whoever waits for them.
  }
  return calls;
}

}  // namespace pyparallel::dist
