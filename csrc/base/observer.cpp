#include "base/observer.h"

#include <atomic>

namespace pyparallel {
namespace {
std::atomic<CallObserver*> installed{nullptr};
}

void set_call_observer(CallObserver* observer) noexcept { installed.store(observer); }

Observed::Observed(const char* op, const std::string& group)
    : observer_(installed.load(std::memory_order_acquire)) {
  if (observer_ != nullptr) call_ = observer_->begin(op, group);
}

}  // namespace pyparallel
