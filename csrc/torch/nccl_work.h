// What a call on an accelerator returns to torch: its end is a point in a stream.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "nccl/communicator.h"
#include "torch/device_streams.h"
#include "torch/work.h"

namespace pyparallel::dist {

class NcclWork final : public c10d::Work {
 public:
  struct Facts {
    std::string what;  // "all_reduce #7, group tp, rank 1"
    std::uint64_t sequence = 0;
    c10::Device device{c10::DeviceType::CPU};
    Outputs outputs;
    bool waits_on_host = false;  // a barrier: wait() returns when it is done
    // Empty while the group is usable, else why not.
    std::function<std::string()> failure;
    std::function<std::string()> absent;  // who has not come, for the text of a timeout
    std::function<void(const std::string&)> abort;
  };

  // `stream` is where the call was put.
  NcclWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
           Facts facts, const DeviceStreams& streams, c10::Stream stream);

  bool isCompleted() override;
  bool isSuccess() const override;
  // Orders the current stream after the call. With a timeout it also waits here, and at its end
  // aborts the group and throws Timeout.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::uint64_t getSequencenumber() const override { return facts_.sequence; }

 private:
  void throw_if_failed() const;
  void wait_here(std::chrono::milliseconds timeout);

  const Facts facts_;
  const DeviceStreams streams_;
  const Mark end_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace pyparallel::dist
