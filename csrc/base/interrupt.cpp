#include "base/interrupt.h"

#include <atomic>

namespace pyparallel {
namespace {
std::atomic<InterruptCheck> installed{nullptr};
}

void set_interrupt_check(InterruptCheck check) noexcept { installed.store(check); }

bool interrupt_requested() {
  InterruptCheck check = installed.load(std::memory_order_relaxed);
  return check != nullptr && check();
}

InterruptNote& interrupt_note() noexcept {
  static thread_local InterruptNote note;
  return note;
}

}  // namespace pyparallel
