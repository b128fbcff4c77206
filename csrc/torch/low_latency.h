// Small all-reduces of one group by the kernels of csrc/cuda, in symmetric memory of its own.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "cuda/choice.h"
#include "shm/communicator.h"
#include "symmetric/symmetric_memory.h"
#include "torch/rendezvous.h"

namespace pyparallel::dist {

class LowLatency {
 public:
  // Collective over the seat's group, all of whose ranks have a device on one host (else it throws
  // Unsupported, as where kernels, driver or peer access lack). `device` is current.
  LowLatency(const Seat& seat, const Topology& topology, int device, Deadline deadline);

  // Starts the in-place sum on the stream where the kernels are predicted to win; false: use NCCL.
  // Every rank gets the same answer for the same call. Throws what an earlier call ended with.
  bool all_reduce(void* data, std::size_t count, DType dtype, void* stream,
                  std::chrono::milliseconds timeout);
  std::string failure() const;  // of a kernel's wait; empty while there is none
  void abort() noexcept;        // ends the waits of this rank's kernels

 private:
  const cuda::Choice& choice(std::size_t count, DType dtype);

  const std::string group_;
  std::shared_ptr<shm::Communicator> ranks_;
  std::shared_ptr<symmetric::SymmetricMemory> memory_;
  at::Tensor status_;  // memory that device and host can write: pinned
  cuda::Seat kernels_;
  std::map<std::pair<std::size_t, DType>, cuda::Choice> choices_;
};

}  // namespace pyparallel::dist
