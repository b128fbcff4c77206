// The calls between startCoalescing and endCoalescing.
//
// Collectives are collected and queued as one at the end; messages start at once. Whoever waits for
// one of the collectives before the end queues what there is: a batch that is never ended (torch
// does not come to endCoalescing() when something between raises) makes nobody wait for ever.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "shm/communicator.h"

namespace pyparallel::dist {

class CallBatch {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  CallBatch(std::shared_ptr<shm::Communicator> communicator, std::string group)
      : communicator_(std::move(communicator)), group_(std::move(group)) {}

  void open();  // throws InvalidArgument while one is open
  // Queues what was collected, ends the device's batch; gives the works of all calls since open().
  std::vector<Work> close();
  bool is_open() const { return open_.load(std::memory_order_relaxed); }

  // Collects a collective; false where no batch is open. `work` is null for what gives none.
  bool add(const std::function<void()>& call, const Work& work);
  void add(const Work& message);  // one that has started; nothing to do unless a batch is open
  // A call goes to the backend of another device: the batch is opened there as well.
  void enter(c10d::Backend& device);
  // Queues what is collected; the batch stays open.
  void submit();

 private:
  using Calls = std::shared_ptr<std::vector<std::function<void()>>>;
  Calls queue();

  const std::shared_ptr<shm::Communicator> communicator_;
  const std::string group_;
  std::mutex mutex_;
  std::atomic<bool> open_{false};
  std::vector<std::function<void()>> calls_;
  std::vector<Work> works_;
  c10d::Backend* device_ = nullptr;  // in a batch of its own, for this one
};

}  // namespace pyparallel::dist
