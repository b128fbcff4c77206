// Finds libpyparallel_cuda.so, checks what is asked of it, and turns its errors into exceptions.
// Nothing here needs a GPU, a driver or CUDA headers to compile or to start.
#pragma once

#include <string>

#include "cuda/calls.h"
#include "cuda/kernels.h"

namespace pyparallel::cuda {

class Kernels {
 public:
  // Opened at the first call, once per process, and never closed. Place: PYPARALLEL_CUDA_LIB, else
  // beside libpyparallel. Throws Unsupported: what was tried, the loader's own words, the mend.
  static const Kernels& get();
  // Empty where get() works and the current device can be asked, else why not. For doctor.
  static std::string unavailable() noexcept;
  // Opens this file; no search. For tests.
  explicit Kernels(const std::string& path);
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Starts the request on the stream. Asynchronous; throws InvalidArgument before, CudaError after
  // CUDA refused. Whether its waits succeeded is seen in the status page, see raise_failure().
  void launch(const Request& request, const Seat& seat, void* stream) const;
  // To be called once per device before its first launch. Loading a kernel may wait for those that
  // run; one that waits for a launch which comes after the load would make that a deadlock.
  void prepare() const;
  Device current_device() const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const KernelTable* table_ = nullptr;
};

// Empty while the page says ok, else what went wrong: op, call, ranks, expected and seen.
std::string describe_failure(const StatusPage& page, const std::string& group);
// Throws Timeout, Mismatch or Aborted with that text; returns while the page says ok. The page may
// be in use: its state is read with acquire order.
void raise_failure(const StatusPage& page, const std::string& group);
// Ends every wait of this rank's kernels. The page must be in memory the host can write (mapped).
void request_abort(StatusPage& page) noexcept;

}  // namespace pyparallel::cuda
