// The C ABI of shm::Communicator: arguments checked and translated, nothing else.
#include <algorithm>
#include <cstring>
#include <string>

#include "capi/guard.h"

namespace shm = pyparallel::shm;
using namespace pyparallel::capi;
using pyparallel::Deadline;
using pyparallel::DType;
using shm::Block;
using shm::ConstBlock;

// The values of the header are those of the core.
static_assert(PYPARALLEL_INTERNAL == static_cast<int>(pyparallel::Status::internal));
static_assert(PYPARALLEL_BOOL == static_cast<int>(DType::boolean));
static_assert(PYPARALLEL_BXOR == static_cast<int>(pyparallel::ReduceOp::bxor));
static_assert(PYPARALLEL_UNIQUE_ID_BYTES == shm::UniqueId::size);
static_assert(PYPARALLEL_ANY_SOURCE == shm::Communicator::any_source);

extern "C" {

// --- life

pyparallel_status_t pyparallel_get_unique_id(pyparallel_unique_id_t* id) {
  return guard([&] {
    given(id, "id");
    const shm::UniqueId fresh = shm::UniqueId::random();
    std::memcpy(id->bytes, fresh.bytes.data(), sizeof id->bytes);
  });
}

pyparallel_status_t pyparallel_join(const pyparallel_unique_id_t* id, int32_t rank, int32_t size,
                                    const char* name, int64_t timeout_ms, pyparallel_comm_t* comm) {
  return guard([&] {
    shm::UniqueId key;
    std::memcpy(key.bytes.data(), given(id, "id")->bytes, sizeof id->bytes);
    given(comm, "comm");
    shm::Options options;
    if (name != nullptr) options.name = name;
    options.timeout = timeout_of(options.timeout, timeout_ms);
    auto handle = std::make_unique<pyparallel_comm>();
    handle->seat = shm::Communicator::join(key, rank, size, options);
    *comm = handle.release();
  });
}

pyparallel_status_t pyparallel_split(pyparallel_comm_t comm, int32_t color, int32_t key,
                                     const char* name, pyparallel_comm_t* part) {
  return collective(comm, "split", [&](shm::Communicator& seat) {
    given(part, "part");
    shm::Options options;
    options.name = name != nullptr ? std::string(name) : pyparallel::str(seat.name(), "/", color);
    options.timeout = seat.timeout();
    auto handle = std::make_unique<pyparallel_comm>();
    handle->seat = seat.split(color, key, options);
    *part = handle->seat ? handle.release() : nullptr;
  });
}

pyparallel_status_t pyparallel_abort(pyparallel_comm_t comm, const char* why) {
  return guard([&] { seat_of(comm).abort(why != nullptr ? why : "abort was called"); });
}

pyparallel_status_t pyparallel_close(pyparallel_comm_t comm) {
  return guard([&] { seat_of(comm).close(); });
}

pyparallel_status_t pyparallel_destroy(pyparallel_comm_t* comm) {
  return guard([&] {
    if (*given(comm, "comm") == nullptr) return;
    (*comm)->seat->close();
    delete *comm;
    *comm = nullptr;
  });
}

pyparallel_status_t pyparallel_rank(pyparallel_comm_t comm, int32_t* rank) {
  return guard([&] { *given(rank, "rank") = seat_of(comm).rank(); });
}

pyparallel_status_t pyparallel_size(pyparallel_comm_t comm, int32_t* size) {
  return guard([&] { *given(size, "size") = seat_of(comm).size(); });
}

pyparallel_status_t pyparallel_sequence(pyparallel_comm_t comm, uint64_t* sequence) {
  return guard([&] { *given(sequence, "sequence") = seat_of(comm).sequence(); });
}

pyparallel_status_t pyparallel_pid(pyparallel_comm_t comm, int32_t rank, int32_t* pid) {
  return guard([&] {
    shm::Communicator& seat = seat_of(comm);
    require(rank >= 0 && rank < seat.size(), "rank ", rank, " of a group of ", seat.size());
    *given(pid, "pid") = seat.pid_of(rank);
  });
}

pyparallel_status_t pyparallel_get_timeout(pyparallel_comm_t comm, int64_t* timeout_ms) {
  return guard([&] { *given(timeout_ms, "timeout_ms") = seat_of(comm).timeout().count(); });
}

pyparallel_status_t pyparallel_set_timeout(pyparallel_comm_t comm, int64_t timeout_ms) {
  return guard([&] {
    require(timeout_ms >= 0, "timeout of ", timeout_ms, " ms; expected at least 0");
    seat_of(comm).set_timeout(std::chrono::milliseconds(timeout_ms));
  });
}

pyparallel_status_t pyparallel_failure(pyparallel_comm_t comm, char* text, size_t bytes,
                                       size_t* needed) {
  return guard([&] {
    const std::string why = seat_of(comm).failure();
    if (needed != nullptr) *needed = why.size() + 1;
    if (bytes == 0) return;
    const std::size_t fits = std::min(why.size(), bytes - 1);
    std::memcpy(given(text, "text"), why.data(), fits);
    text[fits] = '\0';
  });
}

// --- collectives

pyparallel_status_t pyparallel_all_reduce(pyparallel_comm_t comm, const void* in, void* out,
                                          uint64_t count, pyparallel_dtype_t dtype,
                                          pyparallel_op_t op, double factor, int64_t timeout_ms) {
  return collective(comm, "all_reduce", [&](shm::Communicator& seat) {
    seat.all_reduce(array_of(in, count, "in"), array_of(out, count, "out"), count, dtype_of(dtype),
                    reduction_of(op, factor), deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_reduce(pyparallel_comm_t comm, const void* in, void* out,
                                      uint64_t count, pyparallel_dtype_t dtype, pyparallel_op_t op,
                                      double factor, int32_t root, int64_t timeout_ms) {
  return collective(comm, "reduce", [&](shm::Communicator& seat) {
    if (seat.rank() == root) array_of(out, count, "out");
    seat.reduce(array_of(in, count, "in"), out, count, dtype_of(dtype), reduction_of(op, factor),
                root, deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_reduce_scatter(pyparallel_comm_t comm, const void* in, void* out,
                                              uint64_t count, pyparallel_dtype_t dtype,
                                              pyparallel_op_t op, double factor,
                                              int64_t timeout_ms) {
  return collective(comm, "reduce_scatter", [&](shm::Communicator& seat) {
    const DType type = dtype_of(dtype);
    const auto blocks = even_blocks<ConstBlock>(in, count, type, seat.size(), "in");
    seat.reduce_scatter(blocks.data(), array_of(out, count, "out"), type, reduction_of(op, factor),
                        deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_reduce_scatter_v(pyparallel_comm_t comm, const void* const* in,
                                                const uint64_t* counts, void* out,
                                                pyparallel_dtype_t dtype, pyparallel_op_t op,
                                                double factor, int64_t timeout_ms) {
  return collective(comm, "reduce_scatter", [&](shm::Communicator& seat) {
    const auto blocks = blocks_of<ConstBlock>(in, counts, seat.size(), "in");
    array_of(out, blocks[seat.rank()].count, "out");
    seat.reduce_scatter(blocks.data(), out, dtype_of(dtype), reduction_of(op, factor),
                        deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_all_gather(pyparallel_comm_t comm, const void* in, void* out,
                                          uint64_t count, pyparallel_dtype_t dtype,
                                          int64_t timeout_ms) {
  return collective(comm, "all_gather", [&](shm::Communicator& seat) {
    const DType type = dtype_of(dtype);
    const auto blocks = even_blocks<Block>(out, count, type, seat.size(), "out");
    seat.all_gather(array_of(in, count, "in"), blocks.data(), type, deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_all_gather_v(pyparallel_comm_t comm, const void* in,
                                            void* const* out, const uint64_t* counts,
                                            pyparallel_dtype_t dtype, int64_t timeout_ms) {
  return collective(comm, "all_gather", [&](shm::Communicator& seat) {
    const auto blocks = blocks_of<Block>(out, counts, seat.size(), "out");
    array_of(in, blocks[seat.rank()].count, "in");
    seat.all_gather(in, blocks.data(), dtype_of(dtype), deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_all_to_all(pyparallel_comm_t comm, const void* in, void* out,
                                          uint64_t count, pyparallel_dtype_t dtype,
                                          int64_t timeout_ms) {
  return collective(comm, "all_to_all", [&](shm::Communicator& seat) {
    const DType type = dtype_of(dtype);
    const auto sent = even_blocks<ConstBlock>(in, count, type, seat.size(), "in");
    const auto received = even_blocks<Block>(out, count, type, seat.size(), "out");
    seat.all_to_all(sent.data(), received.data(), type, deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_all_to_all_v(pyparallel_comm_t comm, const void* const* in,
                                            const uint64_t* in_counts, void* const* out,
                                            const uint64_t* out_counts, pyparallel_dtype_t dtype,
                                            int64_t timeout_ms) {
  return collective(comm, "all_to_all", [&](shm::Communicator& seat) {
    const auto sent = blocks_of<ConstBlock>(in, in_counts, seat.size(), "in");
    const auto received = blocks_of<Block>(out, out_counts, seat.size(), "out");
    seat.all_to_all(sent.data(), received.data(), dtype_of(dtype), deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_broadcast(pyparallel_comm_t comm, void* data, uint64_t count,
                                         pyparallel_dtype_t dtype, int32_t root,
                                         int64_t timeout_ms) {
  return collective(comm, "broadcast", [&](shm::Communicator& seat) {
    seat.broadcast(array_of(data, count, "data"), count, dtype_of(dtype), root,
                   deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_scatter(pyparallel_comm_t comm, const void* in, void* out,
                                       uint64_t count, pyparallel_dtype_t dtype, int32_t root,
                                       int64_t timeout_ms) {
  return collective(comm, "scatter", [&](shm::Communicator& seat) {
    const DType type = dtype_of(dtype);
    std::vector<ConstBlock> blocks;
    if (seat.rank() == root) blocks = even_blocks<ConstBlock>(in, count, type, seat.size(), "in");
    seat.scatter(blocks.data(), Block{array_of(out, count, "out"), count}, type, root,
                 deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_scatter_v(pyparallel_comm_t comm, const void* const* in,
                                         const uint64_t* in_counts, void* out, uint64_t out_count,
                                         pyparallel_dtype_t dtype, int32_t root,
                                         int64_t timeout_ms) {
  return collective(comm, "scatter", [&](shm::Communicator& seat) {
    std::vector<ConstBlock> blocks;
    if (seat.rank() == root) blocks = blocks_of<ConstBlock>(in, in_counts, seat.size(), "in");
    seat.scatter(blocks.data(), Block{array_of(out, out_count, "out"), out_count}, dtype_of(dtype),
                 root, deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_gather(pyparallel_comm_t comm, const void* in, void* out,
                                      uint64_t count, pyparallel_dtype_t dtype, int32_t root,
                                      int64_t timeout_ms) {
  return collective(comm, "gather", [&](shm::Communicator& seat) {
    const DType type = dtype_of(dtype);
    std::vector<Block> blocks;
    if (seat.rank() == root) blocks = even_blocks<Block>(out, count, type, seat.size(), "out");
    seat.gather(ConstBlock{array_of(in, count, "in"), count}, blocks.data(), type, root,
                deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_gather_v(pyparallel_comm_t comm, const void* in, uint64_t in_count,
                                        void* const* out, const uint64_t* out_counts,
                                        pyparallel_dtype_t dtype, int32_t root,
                                        int64_t timeout_ms) {
  return collective(comm, "gather", [&](shm::Communicator& seat) {
    std::vector<Block> blocks;
    if (seat.rank() == root) blocks = blocks_of<Block>(out, out_counts, seat.size(), "out");
    seat.gather(ConstBlock{array_of(in, in_count, "in"), in_count}, blocks.data(), dtype_of(dtype),
                root, deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_barrier(pyparallel_comm_t comm, int64_t timeout_ms) {
  return collective(comm, "barrier",
                    [&](shm::Communicator& seat) { seat.barrier(deadline_of(seat, timeout_ms)); });
}

pyparallel_status_t pyparallel_refuse(pyparallel_comm_t comm, const char* op, const char* why) {
  return guard([&] { seat_of(comm).refuse(given(op, "op"), given(why, "why")); });
}

// --- point to point

pyparallel_status_t pyparallel_send(pyparallel_comm_t comm, const void* data, uint64_t count,
                                    pyparallel_dtype_t dtype, int32_t destination, int64_t tag,
                                    int64_t timeout_ms) {
  return guard([&] {
    shm::Communicator& seat = seat_of(comm);
    seat.send(array_of(data, count, "data"), count, dtype_of(dtype), destination, tag,
              deadline_of(seat, timeout_ms));
  });
}

pyparallel_status_t pyparallel_recv(pyparallel_comm_t comm, void* data, uint64_t count,
                                    pyparallel_dtype_t dtype, int32_t source, int64_t tag,
                                    int64_t timeout_ms, int32_t* from) {
  return guard([&] {
    shm::Communicator& seat = seat_of(comm);
    const int sender = seat.recv(array_of(data, count, "data"), count, dtype_of(dtype), source, tag,
                                 deadline_of(seat, timeout_ms));
    if (from != nullptr) *from = sender;
  });
}

pyparallel_status_t pyparallel_isend(pyparallel_comm_t comm, const void* data, uint64_t count,
                                     pyparallel_dtype_t dtype, int32_t destination, int64_t tag,
                                     pyparallel_request_t* request) {
  return guard([&] {
    shm::Communicator& seat = seat_of(comm);
    given(request, "request");
    auto handle = std::make_unique<pyparallel_request>();
    handle->seat = comm->seat;
    handle->work =
        seat.isend(array_of(data, count, "data"), count, dtype_of(dtype), destination, tag);
    *request = handle.release();
  });
}

pyparallel_status_t pyparallel_irecv(pyparallel_comm_t comm, void* data, uint64_t count,
                                     pyparallel_dtype_t dtype, int32_t source, int64_t tag,
                                     pyparallel_request_t* request) {
  return guard([&] {
    shm::Communicator& seat = seat_of(comm);
    given(request, "request");
    auto handle = std::make_unique<pyparallel_request>();
    handle->seat = comm->seat;
    handle->work = seat.irecv(array_of(data, count, "data"), count, dtype_of(dtype), source, tag);
    *request = handle.release();
  });
}

pyparallel_status_t pyparallel_wait(pyparallel_request_t request, int64_t timeout_ms,
                                    int32_t* from) {
  return guard([&] {
    given(request, "the request");
    request->work->wait(deadline_of(*request->seat, timeout_ms));
    if (from != nullptr) *from = request->work->source();
  });
}

pyparallel_status_t pyparallel_test(pyparallel_request_t request, int32_t* done) {
  return guard([&] { *given(done, "done") = given(request, "the request")->work->done() ? 1 : 0; });
}

pyparallel_status_t pyparallel_request_free(pyparallel_request_t* request) {
  return guard([&] {
    delete *given(request, "request");
    *request = nullptr;
  });
}

}  // extern "C"
