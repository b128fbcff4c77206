// A thread that runs queued calls one after another: what makes a collective asynchronous.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "shm/communicator.h"

namespace pyparallel::shm {

class Worker {
 public:
  explicit Worker(std::string name) : state_(std::make_shared<State>(std::move(name))) {}
  ~Worker() { stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Throws SystemError where the thread cannot be started; then the call is not queued.
  std::shared_ptr<Work> enqueue(std::function<void()> call);
  // Waits until nothing is queued or running; at once on the worker's own thread.
  void drain(const Deadline& deadline);
  bool idle() const { return state_->unfinished.load(std::memory_order_acquire) == 0; }
  bool on_this_thread() const {
    return state_->thread.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  // Ends what is queued with Closed. Never waits: the thread ends after its current call.
  void stop() noexcept;

 private:
  class Job;
  struct State {
    explicit State(std::string group_name) : name(std::move(group_name)) {}
    const std::string name;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::shared_ptr<Job>> queue;
    std::atomic<std::size_t> unfinished{0};
    std::atomic<std::thread::id> thread{};
    bool running = false;
    bool stopped = false;
  };
  static void run(const std::shared_ptr<State>& state);
  static void stop(State& state, const std::exception_ptr& why) noexcept;
  std::shared_ptr<State> state_;  // outlives this object while the thread is in a call
};

}  // namespace pyparallel::shm
