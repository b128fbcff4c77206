// How the C ABI reports: every function body runs in guard(), exceptions become a status and a
// text.
#pragma once

#include <pyparallel/pyparallel.h>

#include <chrono>
#include <exception>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "shm/communicator.h"

// The opaque handles. A handle shares its object with calls that are still running.
struct pyparallel_comm {
  std::shared_ptr<pyparallel::shm::Communicator> seat;
};
struct pyparallel_request {
  std::shared_ptr<pyparallel::shm::Work> work;
  std::shared_ptr<pyparallel::shm::Communicator> seat;  // its timeout; alive while the call runs
};

namespace pyparallel::capi {

// Keeps `what` (cut to the fixed buffer of this thread) and gives the status. Never throws.
pyparallel_status_t fail(Status status, const char* what) noexcept;

template <typename Body>
pyparallel_status_t guard(Body&& body) noexcept {
  try {
    body();
    return PYPARALLEL_OK;
  } catch (const Error& error) {
    return fail(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return fail(Status::no_memory, "out of memory in this process");
  } catch (const std::exception& error) {
    return fail(Status::internal, error.what());
  } catch (...) {
    return fail(Status::internal, "an exception of an unknown type");
  }
}

// --- arguments, checked before use. `what` names them in the message.

// What these checks throw: the core has not yet heard of the call.
struct BadCall : InvalidArgument {
  using InvalidArgument::InvalidArgument;
};

template <typename... Pieces>
void require(bool condition, const Pieces&... pieces) {
  if (!condition) throw BadCall(str(pieces...));
}

shm::Communicator& seat_of(pyparallel_comm_t comm);

// The body of a collective. When its arguments are refused here the other ranks hear of it, so that
// all of them fail at once instead of waiting for this one.
template <typename Body>
pyparallel_status_t collective(pyparallel_comm_t comm, const char* op, Body&& body) noexcept {
  return guard([&] {
    shm::Communicator& seat = seat_of(comm);
    try {
      body(seat);
    } catch (const BadCall& error) {
      seat.refuse(op, error.what());
      throw;
    }
  });
}

// `usual` for PYPARALLEL_DEFAULT_TIMEOUT.
std::chrono::milliseconds timeout_of(std::chrono::milliseconds usual, std::int64_t timeout_ms);

// The deadline of a call on a communicator or a symmetric memory.
template <typename Seat>
Deadline deadline_of(const Seat& seat, std::int64_t timeout_ms) {
  return Deadline::after(timeout_of(seat.timeout(), timeout_ms));
}

DType dtype_of(pyparallel_dtype_t dtype);
shm::Reduction reduction_of(pyparallel_op_t op, double factor);

template <typename T>
T* given(T* pointer, const char* what) {
  require(pointer != nullptr, what, " is NULL");
  return pointer;
}

// An array of `count` elements, which may be NULL only when it is empty.
template <typename T>
T* array_of(T* data, std::uint64_t count, const char* what) {
  require(data != nullptr || count == 0, what, " is NULL, but ", count, " elements were asked for");
  return data;
}

// `size` consecutive blocks of `count` elements from `data` on.
template <typename AnyBlock, typename Pointer>
std::vector<AnyBlock> even_blocks(Pointer* data, std::uint64_t count, DType dtype, int size,
                                  const char* what) {
  using Byte = std::conditional_t<std::is_const_v<Pointer>, const char, char>;
  array_of(data, count, what);
  std::vector<AnyBlock> blocks(size);
  for (int r = 0; r < size; ++r) {
    blocks[r].data = count == 0 ? data : static_cast<Byte*>(data) + r * count * size_of(dtype);
    blocks[r].count = count;
  }
  return blocks;
}

// One block per rank from arrays of pointers and counts.
template <typename AnyBlock, typename Pointer>
std::vector<AnyBlock> blocks_of(Pointer* const* data, const std::uint64_t* counts, int size,
                                const char* what) {
  given(counts, "the array of counts");
  given(data, what);
  std::vector<AnyBlock> blocks(size);
  for (int r = 0; r < size; ++r) {
    require(data[r] != nullptr || counts[r] == 0, what, "[", r, "] is NULL, but counts[", r,
            "] is ", counts[r]);
    blocks[r] = AnyBlock{data[r], counts[r]};
  }
  return blocks;
}

}  // namespace pyparallel::capi
