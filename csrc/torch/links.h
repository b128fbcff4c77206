// What crosses hosts: byte transfers between the leaders of the hosts, carried by torch's gloo.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "base/deadline.h"
#include "torch/worker.h"

namespace pyparallel::dist {

// Memory as the list of one tensor that gloo takes.
std::vector<at::Tensor> bytes_at(void* data, std::size_t bytes);

// One end of a group of hosts. Used by one thread at a time, but for abort().
class Links {
 public:
  struct Transfer {
    int host = 0;
    void* data = nullptr;
    std::size_t bytes = 0;  // the same at both ends; nothing is carried for 0
  };

  // `gloo` has one rank per host. `names` say how messages call each host. `trouble` tells whether
  // a wait should end early and why; empty while all is well.
  Links(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<std::string> names,
        std::function<std::string()> trouble);
  ~Links();

  int host() const { return host_; }
  int hosts() const { return static_cast<int>(names_.size()); }
  // Both directions at once, until all is done. Throws Timeout, PeerLost or Aborted naming the
  // host; the links are then broken.
  void transfer(const std::string& what, const std::vector<Transfer>& sends,
                const std::vector<Transfer>& receives, Deadline deadline);
  void abort() noexcept;  // ends a running transfer; the other hosts see the connections close

 private:
  using Pending = std::vector<std::pair<int, c10::intrusive_ptr<c10d::Work>>>;
  void wait(const std::string& what, const Pending& pending, Deadline deadline);

  c10::intrusive_ptr<c10d::Backend> gloo_;  // released by abort()
  std::mutex gloo_mutex_;
  const std::vector<std::string> names_;
  const std::function<std::string()> trouble_;
  const int host_;
  std::atomic<bool> aborted_{false};
  Worker waiter_;
};

}  // namespace pyparallel::dist
