#include "nccl/watchdog.h"

#include <chrono>
#include <thread>

#include "base/error.h"
#include "base/thread.h"
#include "nccl/background.h"
#include "nccl/communicator.h"

namespace pyparallel::nccl {
namespace {
constexpr std::chrono::milliseconds period{100};
// Events are kept for reuse, up to this many.
constexpr std::size_t most_spare = 256;
}  // namespace

void Watch::retire_front() {
  if (spare_.size() < most_spare) spare_.push_back(std::move(pending_.front().event));
  pending_.pop_front();
}

void Watch::launched(Stream stream, std::string text, Deadline deadline) {
  if (!can_record_events()) return;
  const InContext in(context_);
  const std::lock_guard<std::mutex> lock(mutex_);
  // Two out for one in: the list stays short without waiting for the watchdog.
  for (int i = 0; i < 2 && !pending_.empty() && pending_.front().event->done(); ++i) retire_front();
  std::unique_ptr<Event> event;
  if (spare_.empty()) {
    event = Event::record(stream);
  } else {
    event = std::move(spare_.back());
    spare_.pop_back();
    if (!event->record_again(stream)) {
      spare_.push_back(std::move(event));
      return;
    }
  }
  if (event != nullptr) pending_.push_back({std::move(event), std::move(text), deadline});
}

void Watch::entered(std::string text, Deadline deadline) {
  const std::lock_guard<std::mutex> lock(mutex_);
  inside_ = std::move(text);
  inside_deadline_ = deadline;
}

void Watch::left() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  inside_.clear();
}

std::string Watch::overdue() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!inside_.empty() && inside_deadline_.expired()) {
    return str(inside_, " has not returned after ", inside_deadline_.timeout_seconds(),
               " s: a peer has not come, or is stuck");
  }
  if (pending_.empty()) return {};
  const InContext in(context_);
  while (!pending_.empty() && pending_.front().event->done()) retire_front();
  for (const Pending& pending : pending_) {
    if (pending.deadline.expired() && !pending.event->done()) {
      return str(pending.text, " was launched and is not done after ",
                 pending.deadline.timeout_seconds(),
                 " s: a peer has not launched its part, or a kernel before it is stuck");
    }
  }
  return {};
}

void Watchdog::add(std::weak_ptr<Communicator> communicator) {
  Watchdog& dog = per_process<Watchdog>();
  const std::lock_guard<std::mutex> lock(dog.mutex_);
  dog.communicators_.push_back(std::move(communicator));
  if (dog.running_) return;
  start_thread(
      "the thread that watches communicators", [&dog] { run(dog); },
      [&dog](const std::exception_ptr&) noexcept {  // add() starts it again
        const std::lock_guard<std::mutex> ending(dog.mutex_);
        dog.running_ = false;
      });
  dog.running_ = true;
}

// Ends when there is nothing left to watch; add() starts it again.
void Watchdog::run(Watchdog& dog) {
  for (;;) {
    std::vector<std::weak_ptr<Communicator>> all;
    {
      const std::lock_guard<std::mutex> lock(dog.mutex_);
      auto& list = dog.communicators_;
      for (std::size_t i = list.size(); i-- > 0;) {
        const std::shared_ptr<Communicator> alive = list[i].lock();
        if (alive == nullptr || alive->closed()) list.erase(list.begin() + static_cast<long>(i));
      }
      if (list.empty() || background_ended()) {
        dog.running_ = false;
        return;
      }
      all = list;
    }
    for (const auto& weak : all) {
      if (const auto communicator = weak.lock()) communicator->watchdog_tick();
    }
    std::this_thread::sleep_for(period);
  }
}

}  // namespace pyparallel::nccl
