// The C ABI of symmetric::SymmetricMemory.
#include "capi/guard.h"
#include "symmetric/symmetric_memory.h"

namespace symmetric = pyparallel::symmetric;
using namespace pyparallel::capi;

struct pyparallel_symmetric {
  std::shared_ptr<symmetric::SymmetricMemory> seat;
};

namespace {

symmetric::SymmetricMemory& memory_of(pyparallel_symmetric_t memory) {
  require(memory != nullptr, "the symmetric memory is NULL: not created, or destroyed");
  return *memory->seat;
}

void check_rank(const symmetric::SymmetricMemory& memory, const char* what, int32_t rank) {
  require(rank >= 0 && rank < memory.size(), what, " is ", rank, "; expected 0 to ",
          memory.size() - 1);
}

// As collective() of guard.h, for the collective calls on a memory.
template <typename Body>
pyparallel_status_t together(pyparallel_symmetric_t memory, const char* op, Body&& body) noexcept {
  return guard([&] {
    symmetric::SymmetricMemory& seat = memory_of(memory);
    try {
      body(seat);
    } catch (const BadCall& error) {
      seat.refuse(op, error.what());
      throw;
    }
  });
}

}  // namespace

extern "C" {

pyparallel_status_t pyparallel_symmetric_create(pyparallel_comm_t comm, uint64_t bytes,
                                                int32_t device, const char* name,
                                                int64_t timeout_ms,
                                                pyparallel_symmetric_t* memory) {
  return collective(comm, "symmetric memory", [&](pyparallel::shm::Communicator& group) {
    given(memory, "memory");
    symmetric::Options options;
    if (name != nullptr) options.name = name;
    options.timeout = timeout_of(group.timeout(), timeout_ms);
    options.device = device;
    auto handle = std::make_unique<pyparallel_symmetric>();
    handle->seat = symmetric::SymmetricMemory::create(group, bytes, options);
    *memory = handle.release();
  });
}

pyparallel_status_t pyparallel_symmetric_allocate(pyparallel_symmetric_t memory, uint64_t bytes,
                                                  uint64_t alignment, int64_t timeout_ms,
                                                  uint64_t* offset) {
  return together(memory, "allocate", [&](symmetric::SymmetricMemory& seat) {
    given(offset, "offset");
    *offset = seat.allocate(bytes, alignment, deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_symmetric_release(pyparallel_symmetric_t memory, uint64_t offset,
                                                 int64_t timeout_ms) {
  return together(memory, "release", [&](symmetric::SymmetricMemory& seat) {
    seat.release(offset, deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_symmetric_data(pyparallel_symmetric_t memory, int32_t rank,
                                              void** data) {
  return guard([&] {
    symmetric::SymmetricMemory& seat = memory_of(memory);
    check_rank(seat, "rank", rank);
    *given(data, "data") = seat.data(rank);
  });
}

pyparallel_status_t pyparallel_symmetric_barrier(pyparallel_symmetric_t memory,
                                                 int64_t timeout_ms) {
  return guard([&] {
    symmetric::SymmetricMemory& seat = memory_of(memory);
    seat.barrier(deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_symmetric_put_signal(pyparallel_symmetric_t memory, int32_t peer,
                                                    int32_t channel) {
  return guard([&] {
    symmetric::SymmetricMemory& seat = memory_of(memory);
    check_rank(seat, "peer", peer);
    seat.put_signal(peer, channel);
  });
}

pyparallel_status_t pyparallel_symmetric_wait_signal(pyparallel_symmetric_t memory, int32_t source,
                                                     int32_t channel, int64_t timeout_ms) {
  return guard([&] {
    symmetric::SymmetricMemory& seat = memory_of(memory);
    check_rank(seat, "source", source);
    seat.wait_signal(source, channel, deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_symmetric_destroy(pyparallel_symmetric_t* memory) {
  return guard([&] {
    if (*given(memory, "memory") == nullptr) return;
    (*memory)->seat->close();
    delete *memory;
    *memory = nullptr;
  });
}

}  // extern "C"
