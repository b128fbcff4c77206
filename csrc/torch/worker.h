// A thread that runs calls one after another, in the order in which they were handed over.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "shm/communicator.h"

namespace pyparallel::dist {

// A call's state, shared by who runs it and who waits for it.
class CallWork final : public shm::Work {
 public:
  explicit CallWork(std::string name) : name_(std::move(name)) {}
  bool done() const override;
  void wait(Deadline deadline) override;
  int source() const override { return source_; }

  void finish(std::exception_ptr error, int source = -1);
  // Waits at most that long; true when done.
  bool wait_for(std::chrono::nanoseconds time) const;
  void rethrow() const;  // what the finished call threw

 private:
  const std::string name_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  int source_ = -1;
  std::exception_ptr error_;
};

// The destructor does not wait: a running call goes on, queued ones finish with Closed.
class Worker {
 public:
  explicit Worker(std::string name);
  ~Worker() { close(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::shared_ptr<CallWork> add(std::function<void()> call);
  bool on_this_thread() const { return std::this_thread::get_id() == thread_id_; }
  void close() noexcept;  // idempotent

 private:
  struct Job {
    std::function<void()> call;
    std::shared_ptr<CallWork> work;
  };
  struct State {
    std::string name;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Job> jobs;
    bool closed = false;
  };
  static void serve(const std::shared_ptr<State>& state);
  static void close(State& state, const std::exception_ptr& why) noexcept;

  const std::shared_ptr<State> state_;
  std::thread::id thread_id_;
};

}  // namespace pyparallel::dist
