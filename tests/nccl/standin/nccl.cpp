// libnccl.so.2 of the tests: communicators and groups. Data calls are in data.cpp.
#include <dlfcn.h>

#include "making.h"

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

// Every communicator of the clique is this process's: made one by one, as threads would.
Result ncclCommInitAll(RawComm* comms, int count, const int* devices) {
  ENTER();
  UniqueId id;
  random_id(&id);
  if (has_fault("hang_init_all")) {
    wait_until([] { return tests().let_go.load(); }, [] { return false; });
  }
  std::vector<std::shared_ptr<Comm>> made;
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (int rank = 0; rank < count; ++rank) {
    made.push_back(std::make_shared<Comm>());
    Comm& comm = *made.back();
    comm.name = text_of(id);
    comm.size = count;
    comm.rank = rank;
    comm.device = devices == nullptr ? rank : devices[rank];
  }
  for (auto& comm : made)
    threads.emplace_back([&failed, comm] { failed += join(comm) != Result::success; });
  for (std::thread& thread : threads) thread.join();
  if (failed > 0) return refuse("could not join", Result::system_error);
  for (int rank = 0; rank < count; ++rank) comms[rank] = publish(made[rank]);
  return Result::success;
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
  if (comm->revoked) return refuse("finalized after revoke", Result::invalid_usage);
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

// Ends what runs, without the peers; what is left is to make others out of it, and to destroy it.
Result ncclCommRevoke(RawComm raw, int flags) {
  ENTER();
  const auto comm = find(raw);
  if (comm == nullptr || flags != 0) return refuse("ncclCommRevoke: bad argument");
  comm->revoked = true;
  return run_job(comm, [comm] {
    comm->interrupted = true;
    wait_until([&] { return comm->running == 1; }, comm->stop_of_life());
    comm->interrupted = false;
    return Result::success;
  });
}

Result ncclCommSuspend(RawComm raw, int flags) {
  ENTER();
  READY(comm, raw);
  if (flags != suspend_memory || comm->suspended) return refuse("ncclCommSuspend: bad argument");
  comm->suspended = true;
  return Result::success;
}
Result ncclCommResume(RawComm raw) {
  ENTER();
  READY(comm, raw);
  if (!comm->suspended) return refuse("not suspended", Result::invalid_usage);
  comm->suspended = false;
  return Result::success;
}
Result ncclCommMemStats(RawComm raw, MemoryStat stat, std::uint64_t* value) {
  ENTER();
  READY(comm, raw);
  const bool suspended = comm->suspended;
  switch (stat) {
    case MemoryStat::suspendable:
      *value = suspended ? 0 : 3000;
      return Result::success;
    case MemoryStat::suspended:
      *value = suspended ? 1 : 0;
      return Result::success;
    case MemoryStat::persistent:
      *value = 70;
      return Result::success;
    case MemoryStat::total:
      *value = suspended ? 70 : 3070;
      return Result::success;
  }
  return refuse("ncclCommMemStats: unknown statistic");
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

// Nothing of the group runs; the estimate is a function of its calls.
Result ncclGroupSimulateEnd(SimulationRecord* record) {
  ENTER();
  if (group.depth != 1) return refuse("not the outermost group", Result::invalid_usage);
  if (record->magic != 0x74685283U || record->size < 20) return refuse("bad record");
  group.depth = 0;
  record->estimated_time = 0;
  for (const Call& call : group.calls)
    record->estimated_time += 1.5F + 0.25F * static_cast<float>(call.count);
  group.calls.clear();
  const Result error = group.error;
  group.error = Result::success;
  return error;
}
}
