#include "torch/finisher.h"

#include <algorithm>
#include <chrono>
#include <iterator>

#include "base/thread.h"

namespace pyparallel::dist {

void Finisher::add(std::function<bool()> finished) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (!state_->running) {
    start_thread(
        str("group ", state_->group, ": the thread that completes futures of messages"),
        [state = state_] { run(*state); },
        [state = state_](const std::exception_ptr&) noexcept {
          const std::lock_guard<std::mutex> ending(state->mutex);
          state->asked.clear();
          state->running = false;
        });
    state_->running = true;
  }
  state_->asked.push_back(std::move(finished));
}

void Finisher::run(State& state) {
  using std::chrono::microseconds;
  constexpr microseconds shortest(100), longest(2000);
  std::vector<std::function<bool()>> mine;
  for (auto pause = shortest;; pause = std::min(pause * 2, longest)) {
    {
      const std::lock_guard<std::mutex> lock(state.mutex);
      if (!state.asked.empty()) pause = shortest;
      std::move(state.asked.begin(), state.asked.end(), std::back_inserter(mine));
      state.asked.clear();
      state.running = !mine.empty();
      if (!state.running) return;
    }
    // Without the lock: what hears of an end may start the next message.
    const auto done = std::remove_if(mine.begin(), mine.end(), [](auto& ask) { return ask(); });
    if (done != mine.end()) pause = shortest;
    mine.erase(done, mine.end());
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace pyparallel::dist
