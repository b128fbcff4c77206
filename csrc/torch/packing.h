// Scratch memory in which blocks are packed one after another.
#pragma once

#include <ATen/ATen.h>

#include "shm/reduce.h"

namespace pyparallel::dist {

inline at::Tensor bytes(std::size_t count) {
  return at::empty({static_cast<std::int64_t>(count)}, at::kByte);
}

inline std::byte* byte_at(const at::Tensor& buffer, std::size_t offset) {
  return static_cast<std::byte*>(buffer.data_ptr()) + offset;
}

inline void copy_bytes(void* out, const void* in, std::size_t size) {
  if (size > 0 && in != out) shm::copy(out, in, size, shm::Store::cached);
}

}  // namespace pyparallel::dist
