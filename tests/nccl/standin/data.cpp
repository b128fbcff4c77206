// libnccl.so.2 of the tests: memory, reductions of a communicator, data calls. They run in run.h.
#include "state.h"

namespace standin {

Result submit(Call call) {
  if (group.depth > 0) {
    group.calls.push_back(std::move(call));
    return Result::success;
  }
  std::vector<Call> one;
  one.push_back(std::move(call));
  return launch(std::move(one));
}

}  // namespace standin

using namespace standin;

extern "C" {

// --- memory

Result ncclMemAlloc(void** pointer, std::size_t bytes) {
  ENTER();
  *pointer = std::aligned_alloc(
      window_alignment, (bytes + window_alignment - 1) / window_alignment * window_alignment);
  return *pointer != nullptr ? Result::success : refuse("no memory", Result::system_error);
}
Result ncclMemFree(void* pointer) {
  ENTER();
  std::free(pointer);
  return Result::success;
}

Result ncclCommRegister(RawComm raw, void* pointer, std::size_t bytes, void** handle) {
  ENTER();
  READY(comm, raw);
  const std::lock_guard<std::mutex> lock(comm->mutex);
  *handle = new std::size_t(bytes);
  comm->registered.insert(*handle);
  return Result::success;
}
Result ncclCommDeregister(RawComm raw, void* handle) {
  ENTER();
  READY(comm, raw);
  const std::lock_guard<std::mutex> lock(comm->mutex);
  if (comm->registered.erase(handle) == 0) return refuse("not registered");
  delete static_cast<std::size_t*>(handle);
  return Result::success;
}
Result ncclCommWindowRegister(RawComm raw, void* pointer, std::size_t bytes, RawWindow* window,
                              int) {
  ENTER();
  READY(comm, raw);
  if (has_fault("null_window")) {
    *window = nullptr;
    return Result::success;
  }
  const std::lock_guard<std::mutex> lock(comm->mutex);
  auto* made = new std::size_t(bytes);
  comm->registered.insert(made);
  comm->windows.push_back({made, static_cast<char*>(pointer), bytes});
  *window = reinterpret_cast<RawWindow>(made);
  return Result::success;
}
Result ncclCommWindowDeregister(RawComm raw, RawWindow window) {
  ENTER();
  READY(comm, raw);
  const std::lock_guard<std::mutex> lock(comm->mutex);
  if (comm->registered.erase(window) == 0) return refuse("no such window");
  delete reinterpret_cast<std::size_t*>(window);
  return Result::success;
}

Result ncclRedOpCreatePreMulSum(RedOp* op, void* scalar, DataType type, ScalarResidence residence,
                                RawComm raw) {
  ENTER();
  READY(comm, raw);
  if (residence != ScalarResidence::host) return refuse("only host scalars here");
  const std::lock_guard<std::mutex> lock(comm->mutex);
  *op = static_cast<RedOp>(comm->next_scalar);
  comm->scalars[comm->next_scalar++] = {scalar_of(scalar, type), type};
  return Result::success;
}
Result ncclRedOpDestroy(RedOp op, RawComm raw) {
  ENTER();
  READY(comm, raw);
  const std::lock_guard<std::mutex> lock(comm->mutex);
  return comm->scalars.erase(static_cast<int>(op)) == 1 ? Result::success
                                                        : refuse("no such reduction");
}

// --- data calls

#define DATA_CALL(name)                                                                         \
  ENTER();                                                                                      \
  READY(comm, raw);                                                                             \
  const Result checked = check_data(*comm, name, in, out, count, type, root, op);               \
  if (checked != Result::success) return refuse(std::string(name) + ": bad argument", checked); \
  return submit({comm, stream, name, count, type, op, root, {}, {}, in, out, factor_of(*comm, op)})

Result ncclAllReduce(const void* in, void* out, std::size_t count, DataType type, RedOp op,
                     RawComm raw, Stream stream) {
  constexpr int root = 0;
  DATA_CALL("AllReduce");
}
Result ncclReduce(const void* in, void* out, std::size_t count, DataType type, RedOp op, int root,
                  RawComm raw, Stream stream) {
  DATA_CALL("Reduce");
}
Result ncclBroadcast(const void* in, void* out, std::size_t count, DataType type, int root,
                     RawComm raw, Stream stream) {
  constexpr RedOp op = RedOp::sum;
  DATA_CALL("Broadcast");
}
Result ncclReduceScatter(const void* in, void* out, std::size_t count, DataType type, RedOp op,
                         RawComm raw, Stream stream) {
  constexpr int root = 0;
  DATA_CALL("ReduceScatter");
}
Result ncclAllGather(const void* in, void* out, std::size_t count, DataType type, RawComm raw,
                     Stream stream) {
  constexpr RedOp op = RedOp::sum;
  constexpr int root = 0;
  DATA_CALL("AllGather");
}
Result ncclAlltoAll(const void* in, void* out, std::size_t count, DataType type, RawComm raw,
                    Stream stream) {
  constexpr RedOp op = RedOp::sum;
  constexpr int root = 0;
  DATA_CALL("AlltoAll");
}
Result ncclGather(const void* in, void* out, std::size_t count, DataType type, int root,
                  RawComm raw, Stream stream) {
  constexpr RedOp op = RedOp::sum;
  DATA_CALL("Gather");
}
Result ncclScatter(const void* in, void* out, std::size_t count, DataType type, int root,
                   RawComm raw, Stream stream) {
  constexpr RedOp op = RedOp::sum;
  DATA_CALL("Scatter");
}

Result ncclSend(const void* in, std::size_t count, DataType type, int peer, RawComm raw,
                Stream stream) {
  ENTER();
  READY(comm, raw);
  if (peer < 0 || peer >= comm->size) return refuse("ncclSend: bad peer");
  Call call{comm, stream, "p2p"};
  call.sends.push_back({peer, static_cast<char*>(const_cast<void*>(in)), count * size_of(type)});
  return submit(std::move(call));
}
Result ncclRecv(void* out, std::size_t count, DataType type, int peer, RawComm raw, Stream stream) {
  ENTER();
  READY(comm, raw);
  if (peer < 0 || peer >= comm->size) return refuse("ncclRecv: bad peer");
  Call call{comm, stream, "p2p"};
  call.receives.push_back({peer, static_cast<char*>(out), count * size_of(type)});
  return submit(std::move(call));
}

Result ncclBcast(void* data, std::size_t count, DataType type, int root, RawComm raw,
                 Stream stream) {
  constexpr RedOp op = RedOp::sum;
  const void* in = data;
  void* out = data;
  DATA_CALL("Broadcast");
}

// One-sided, by a message that the peer takes in when it waits for the signal.
Result ncclPutSignal(const void* in, std::size_t count, DataType type, int peer, RawWindow window,
                     std::size_t offset, int signal, int context, unsigned flags, RawComm raw,
                     Stream stream) {
  ENTER();
  READY(comm, raw);
  if (peer < 0 || peer >= comm->size || flags != 0) return refuse("ncclPutSignal: bad argument");
  const std::size_t bytes = count * size_of(type);
  const int number = comm->number_of_window(window, offset + bytes);
  if (number < 0) return refuse("ncclPutSignal: no such window, or beyond its end");
  Call call{comm, stream, "put"};
  call.put = {signal, context, number, offset, bytes};
  call.root = peer;
  call.in = in;
  return submit(std::move(call));
}
Result ncclSignal(int peer, int signal, int context, unsigned flags, RawComm raw, Stream stream) {
  ENTER();
  READY(comm, raw);
  if (peer < 0 || peer >= comm->size || flags != 0) return refuse("ncclSignal: bad argument");
  Call call{comm, stream, "put"};
  call.put = {signal, context, -1, 0, 0};
  call.root = peer;
  return submit(std::move(call));
}
Result ncclWaitSignal(int count, WaitSignalRecord* waits, RawComm raw, Stream stream) {
  ENTER();
  READY(comm, raw);
  Call call{comm, stream, "wait"};
  for (int i = 0; i < count; ++i) {
    if (waits[i].peer < 0 || waits[i].peer >= comm->size || waits[i].count < 1)
      return refuse("ncclWaitSignal: bad argument");
    call.waits.push_back(waits[i]);
  }
  return submit(std::move(call));
}
}
