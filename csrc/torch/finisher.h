// Finishes works that nobody waits for: those whose futures were taken before their end. A message
// is moved by threads of its own, but its end (values given to a strided tensor, its future) is
// somebody's to see.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace pyparallel::dist {

class Finisher {
 public:
  explicit Finisher(std::string group) : state_(std::make_shared<State>()) {
    state_->group = std::move(group);
  }

  // `finished` is asked again and again, by a thread of this object that lives as long as there is
  // something to ask for, until it says true. It must not wait.
  void add(std::function<bool()> finished);

 private:
  struct State {
    std::string group;
    std::mutex mutex;
    std::vector<std::function<bool()>> asked;
    bool running = false;
  };
  static void run(State& state);
  std::shared_ptr<State> state_;  // outlives this object while the thread is busy
};

}  // namespace pyparallel::dist
