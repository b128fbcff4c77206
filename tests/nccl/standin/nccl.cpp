// libnccl.so.2 of the tests: communicators, groups, memory. Data calls run in run.h.
#include <dlfcn.h>

#include <sstream>

#include "comm.h"
#include "run.h"

using namespace pyparallel::nccl;

#define STANDIN_PROTOTYPE(name, major, minor, patch, presence, result, parameters) \
  extern "C" result nccl##name parameters;
PYPARALLEL_NCCL_SYMBOLS(STANDIN_PROTOTYPE)

namespace standin {
namespace {

bool has_fault(const char* name) { return std::string(fault) == name; }

Result refuse(const std::string& why, Result code = Result::invalid_argument) {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  tests().last_error = why;
  if (group.depth > 0) group.error = code;
  return code;
}

// Notes the call. Gives what a test wants it to return, else success.
Result enter(const char* name) {
  Result wanted = Result::success;
  {
    const std::lock_guard<std::mutex> lock(tests().mutex);
    tests().log += std::string(name) + "\n";
    const auto injected = tests().results.find(name);
    if (injected != tests().results.end()) wanted = injected->second;
  }
  return wanted == Result::success ? wanted : refuse(std::string("injected into ") + name, wanted);
}

#define ENTER()                                     \
  do {                                              \
    const Result wanted_ = enter(__func__);         \
    if (wanted_ != Result::success) return wanted_; \
  } while (0)

std::shared_ptr<Comm> find(RawComm raw) {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  const auto found = tests().comms.find(raw);
  return found != tests().comms.end() ? found->second : nullptr;
}

RawComm publish(const std::shared_ptr<Comm>& comm) {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  const auto raw = reinterpret_cast<RawComm>(comm.get());
  tests().comms[raw] = comm;
  return raw;
}

void retire(RawComm raw) {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  tests().comms.erase(raw);
}

// A blocking call that fails leaves nothing; a non-blocking one leaves a handle that says so.
Result end_child(const std::shared_ptr<Comm>& parent, const std::shared_ptr<Comm>& child,
                 Result result) {
  child->state = static_cast<int>(result);
  if (parent->blocking && result != Result::success) retire(reinterpret_cast<RawComm>(child.get()));
  return result;
}

// Runs on the caller's thread for a blocking communicator, else behind its back.
Result run_job(const std::shared_ptr<Comm>& comm, std::function<Result()> job) {
  ++comm->running;
  if (comm->blocking) {
    const Result result = job();
    --comm->running;
    return result;
  }
  comm->state = static_cast<int>(Result::in_progress);
  std::thread([comm, job = std::move(job)] {
    const Result result = job();
    comm->state = static_cast<int>(result);
    --comm->running;
  }).detach();
  return Result::in_progress;
}

Result join(const std::shared_ptr<Comm>& comm) {
  comm->world = open_world(comm->name);
  if (comm->world == nullptr) return refuse("no shared file", Result::system_error);
  ++comm->world->joined;
  World* world = comm->world;
  const int size = comm->size;
  if (!wait_until([=] { return world->joined >= size; }, comm->stop())) {
    return refuse("aborted while joining", Result::internal_error);
  }
  forget_world(comm->name);
  return Result::success;
}

void note_config(const ConfigRecord* config) {
  std::ostringstream text;
  if (config == nullptr) {
    text << "none";
  } else {
    ConfigRecord copy;
    std::memcpy(static_cast<void*>(&copy), config, std::min(config->size, sizeof copy));
    text << "size=" << copy.size << " version=" << copy.version << " blocking=" << copy.blocking
         << " min_ctas=" << copy.min_ctas << " traffic_class=" << copy.traffic_class;
    if (copy.comm_name != nullptr) text << " comm_name=" << copy.comm_name;
  }
  const std::lock_guard<std::mutex> lock(tests().mutex);
  tests().last_config = text.str();
}

Result check_config(const ConfigRecord* config) {
  note_config(config);
  if (config == nullptr) return Result::success;
  if (config->magic != config_magic) return refuse("config: bad magic");
  if (config->size < 24 || config->version < 21403) return refuse("config: bad size or version");
  return Result::success;
}

std::string text_of(const UniqueId& id) {
  return std::string(id.bytes, strnlen(id.bytes, UniqueId::size));
}

// A communicator of `size`, made in the background where it is not blocking.
Result make(RawComm* made, const std::string& name, int size, int rank, bool blocking,
            const std::shared_ptr<Comm>& parent = nullptr) {
  if (size < 1 || size > most_ranks || rank < 0 || rank >= size) return refuse("bad rank or size");
  if (name.rfind("standin-", 0) != 0) return refuse("not a unique id of this library");
  auto comm = std::make_shared<Comm>();
  comm->name = name;
  comm->size = size;
  comm->rank = rank;
  comm->blocking = blocking;
  comm->device = standinDevice();
  if (has_fault("null_comm")) return Result::success;
  if (!blocking) __atomic_store_n(made, publish(comm), __ATOMIC_RELEASE);
  const Result result = run_job(comm, [comm] { return join(comm); });
  if (blocking && result == Result::success) *made = publish(comm);
  return result;
}

Result init(RawComm* made, int size, const UniqueId& id, int rank, const ConfigRecord* config) {
  const Result result = check_config(config);
  if (result != Result::success) return result;
  return make(made, text_of(id), size, rank, config == nullptr || config->blocking != 0);
}

// The communicator, if it may be used for a new call now.
#define READY(comm, raw)                                                              \
  const std::shared_ptr<Comm> comm = find(raw);                                       \
  if (comm == nullptr) return refuse(std::string(__func__) + ": not a communicator"); \
  if (comm->state == static_cast<int>(Result::in_progress)) {                         \
    return refuse(std::string(__func__) + ": the previous call has not finished");    \
  }                                                                                   \
  if (comm->state != 0) return static_cast<Result>(comm->state.load())

Result random_id(UniqueId* id) {
  unsigned char noise[16];
  const int file = ::open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  const bool full = ::read(file, noise, sizeof noise) == sizeof noise;
  ::close(file);
  std::string text = "standin-";
  for (const unsigned char byte : noise) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  std::memset(id->bytes, 0, UniqueId::size);
  text.copy(id->bytes, UniqueId::size);
  return full ? Result::success : Result::system_error;
}

// Everyone's `mine`, over the control channel.
bool all_gather_control(Comm& comm, const std::string& mine, std::vector<std::string>* all) {
  std::string own = mine;
  all->assign(comm.size, std::string(own.size(), '\0'));
  std::vector<Transfer> sends, receives;
  for (int r = 0; r < comm.size; ++r) {
    if (r != comm.rank) sends.push_back({r, own.data(), own.size()});
    if (r != comm.rank) receives.push_back({r, (*all)[r].data(), own.size()});
  }
  (*all)[comm.rank] = own;
  return exchange(*comm.world, control_channel, comm.rank, sends, receives, comm.stop());
}

}  // namespace

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

Result ncclGetVersion(int* found) {
  *found = has_fault("bad_version") ? 7 : version;
  return has_fault("version_error") ? Result::system_error : Result::success;
}

const char* ncclGetErrorString(Result code) {
  return code == Result::success ? "no error" : "words of the stand-in";
}

const char* ncclGetLastError(RawComm) {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  static thread_local std::string copy;
  copy = tests().last_error;
  return copy.c_str();
}

Result ncclGetUniqueId(UniqueId* id) {
  ENTER();
  return random_id(id);
}

Result ncclCommInitRank(RawComm* comm, int size, UniqueId id, int rank) {
  ENTER();
  return init(comm, size, id, rank, nullptr);
}

Result ncclCommInitRankConfig(RawComm* comm, int size, UniqueId id, int rank,
                              ConfigRecord* config) {
  ENTER();
  return init(comm, size, id, rank, config);
}

Result ncclCommInitRankScalable(RawComm* comm, int size, int rank, int ids, UniqueId* id,
                                ConfigRecord* config) {
  ENTER();
  if (ids < 1) return refuse("no ids");
  return init(comm, size, id[0], rank, config);
}

// Destroying waits for the peers unless they have all finalized, as it may in the real library.
Result ncclCommDestroy(RawComm raw) {
  ENTER();
  const auto comm = find(raw);
  if (comm == nullptr) return refuse("ncclCommDestroy: not a communicator");
  if (!comm->finalized) {
    ++comm->world->destroyed;
    wait_until([&] { return comm->world->destroyed >= comm->size; }, comm->stop());
  }
  wait_until([&] { return comm->running == 0; }, [] { return false; });
  retire(raw);
  return Result::success;
}

Result ncclCommFinalize(RawComm raw) {
  ENTER();
  READY(comm, raw);
  if (comm->finalized) return refuse("finalized twice", Result::invalid_usage);
  return run_job(comm, [comm] {
    const bool idle = wait_until([&] { return comm->running == 1; }, comm->stop());
    if (idle) ++comm->world->finalized;
    if (!idle || !wait_until([&] { return comm->world->finalized >= comm->size; }, comm->stop())) {
      return Result::internal_error;
    }
    comm->finalized = true;
    return Result::success;
  });
}

Result ncclCommAbort(RawComm raw) {
  ENTER();
  const auto comm = find(raw);
  if (comm == nullptr) return refuse("ncclCommAbort: not a communicator");
  if (has_fault("hang_abort")) {
    wait_until([] { return tests().let_go.load(); }, [] { return false; });
  }
  comm->aborted = true;
  wait_until([&] { return comm->running == 0; }, [] { return false; });
  retire(raw);
  return Result::success;
}

Result ncclCommGetAsyncError(RawComm raw, Result* state) {
  const auto comm = find(raw);
  if (comm == nullptr) return refuse("ncclCommGetAsyncError: not a communicator");
  *state = static_cast<Result>(comm->state.load());
  return Result::success;
}

Result ncclCommCount(RawComm raw, int* count) {
  READY(comm, raw);
  *count = comm->size;
  return Result::success;
}
Result ncclCommCuDevice(RawComm raw, int* device) {
  READY(comm, raw);
  *device = comm->device;
  return Result::success;
}
Result ncclCommUserRank(RawComm raw, int* rank) {
  READY(comm, raw);
  *rank = comm->rank;
  return Result::success;
}

Result ncclCommSplit(RawComm raw, int color, int key, RawComm* made, ConfigRecord* config) {
  ENTER();
  READY(comm, raw);
  const Result checked = check_config(config);
  if (checked != Result::success) return checked;
  const std::string name =
      comm->name + "-s" + std::to_string(++comm->children) + "c" + std::to_string(color);
  auto child = std::make_shared<Comm>();
  child->name = name;
  child->blocking = config == nullptr ? comm->blocking : config->blocking != 0;
  child->device = comm->device;
  child->state = static_cast<int>(Result::in_progress);
  *made = color == split_no_color ? nullptr : publish(child);
  return run_job(comm, [=] {
    const int mine[2] = {color, key};
    std::vector<std::string> all;
    if (!all_gather_control(*comm, std::string(reinterpret_cast<const char*>(mine), sizeof mine),
                            &all)) {
      return end_child(comm, child, Result::internal_error);
    }
    std::vector<std::pair<int, int>> members;  // key, rank
    for (int r = 0; r < comm->size; ++r) {
      int theirs[2];
      std::memcpy(theirs, all[r].data(), sizeof theirs);
      if (theirs[0] == color) members.emplace_back(theirs[1], r);
    }
    if (color == split_no_color) return Result::success;
    std::sort(members.begin(), members.end());
    child->size = static_cast<int>(members.size());
    for (int i = 0; i < child->size; ++i) {
      if (members[i].second == comm->rank) child->rank = i;
    }
    return end_child(comm, child, join(child));
  });
}

Result ncclCommShrink(RawComm raw, int* excluded, int count, RawComm* made, ConfigRecord* config,
                      int flags) {
  ENTER();
  const auto comm = find(raw);
  if (comm == nullptr) return refuse("ncclCommShrink: not a communicator");
  if (flags == shrink_default && comm->state != 0) return static_cast<Result>(comm->state.load());
  const Result checked = check_config(config);
  if (checked != Result::success) return checked;
  int size = comm->size, rank = comm->rank;
  std::string name = comm->name + "-x" + std::to_string(++comm->children);
  for (int i = 0; i < count; ++i) {
    --size;
    if (excluded[i] < comm->rank) --rank;
    name += "." + std::to_string(excluded[i]);
  }
  if (flags == shrink_abort) {
    comm->aborted = true;
    wait_until([&] { return comm->running == 0; }, [] { return false; });
  }
  return make(made, name, size, rank, config == nullptr ? comm->blocking : config->blocking != 0);
}

Result ncclCommGetUniqueId(RawComm raw, UniqueId* id) {
  ENTER();
  READY(comm, raw);
  return random_id(id);
}

Result ncclCommGrow(RawComm raw, int size, const UniqueId* id, int rank, RawComm* made,
                    ConfigRecord* config) {
  ENTER();
  const Result checked = check_config(config);
  if (checked != Result::success) return checked;
  if (raw == nullptr) {
    if (id == nullptr) return refuse("a new rank needs the id");
    return make(made, text_of(*id), size, rank, config == nullptr || config->blocking != 0);
  }
  READY(comm, raw);
  if (rank != -1) return refuse("a rank that stays passes -1");
  auto child = std::make_shared<Comm>();
  child->blocking = config == nullptr ? comm->blocking : config->blocking != 0;
  child->device = comm->device;
  child->state = static_cast<int>(Result::in_progress);
  child->size = size;
  child->rank = comm->rank;
  *made = publish(child);
  const std::string own =
      id != nullptr ? std::string(id->bytes, UniqueId::size) : std::string(UniqueId::size, '\0');
  return run_job(comm, [=] {
    std::vector<std::string> all;
    if (!all_gather_control(*comm, own, &all)) {
      return end_child(comm, child, Result::internal_error);
    }
    for (const std::string& theirs : all) {
      if (theirs[0] != '\0') child->name = theirs.c_str();
    }
    return end_child(comm, child, join(child));
  });
}

// --- groups

Result ncclGroupStart() {
  ENTER();
  ++group.depth;
  return Result::success;
}

Result ncclGroupEnd() {
  if (group.depth == 0) return refuse("ncclGroupEnd without ncclGroupStart", Result::invalid_usage);
  const Result wanted = enter(__func__);
  if (--group.depth > 0) return wanted;
  std::vector<Call> calls;
  calls.swap(group.calls);
  const Result error = wanted != Result::success ? wanted : group.error;
  group.error = Result::success;
  return error != Result::success ? error : launch(std::move(calls));
}

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

// --- for tests

const char* standinLog() {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  static thread_local std::string copy;
  copy = tests().log;
  tests().log.clear();
  return copy.c_str();
}
const char* standinLastConfig() {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  static thread_local std::string copy;
  copy = tests().last_config;
  return copy.c_str();
}
// The next calls of that function give `code`; 0 ends it.
void standinSetResult(const char* function, int code) {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  tests().results[function] = static_cast<Result>(code);
  if (code == 0) tests().results.erase(function);
}
// All communicators of the process fail in the background.
void standinFailAsync(int code) {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  tests().last_error = "injected in the background";
  for (const auto& [raw, comm] : tests().comms) comm->state = code;
}
int standinAlive() {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  return static_cast<int>(tests().comms.size());
}
// The version as the library's own calls to itself see it, through the table that others can
// change.
int standinVersionThroughTheTable() {
  int found = 0;
  ncclGetVersion(&found);
  return found;
}
void standinLetGo() { tests().let_go = true; }
}
