// What libpyparallel_cuda.so exports: one function that returns this table. Only loader.cpp calls
// it.
#pragma once

#include <cstdint>

#include "cuda/calls.h"

namespace pyparallel::cuda {

struct Device {
  std::int32_t index;
  std::int32_t capability;  // 90 for 9.0
  std::int32_t multiprocessors;
};

struct KernelTable {
  // Of the table and of Call: both objects must have been built from one tree.
  static constexpr std::uint32_t current_version = 1;
  std::uint32_t version;
  std::uint32_t call_bytes;

  // Starts one launch on the stream (a cudaStream_t) of the calling thread's current device.
  // Returns a cudaError_t; checks nothing (the loader does), allocates nothing, waits for nothing,
  // and may be captured.
  int (*launch)(const Call& call, DType dtype, Grid grid, void* stream);
  // Loads every kernel onto the current device. Returns a cudaError_t.
  int (*prepare)();
  // The calling thread's current device. Returns a cudaError_t.
  int (*current_device)(Device* device);
  // Static text.
  const char* (*error_text)(int cuda_error);
};

}  // namespace pyparallel::cuda

extern "C" const pyparallel::cuda::KernelTable* pyparallel_cuda_kernels();
