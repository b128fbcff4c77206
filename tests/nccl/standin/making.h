// How communicators of the stand-in come to be: ids, configurations, ranks that meet in a shared
// file.
#pragma once

#include <sstream>

#include "state.h"

namespace standin {

inline Result join(const std::shared_ptr<Comm>& comm) {
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

inline void note_config(const ConfigRecord* config) {
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

inline Result check_config(const ConfigRecord* config) {
  note_config(config);
  if (config == nullptr) return Result::success;
  if (config->magic != config_magic) return refuse("config: bad magic");
  if (config->size < 24 || config->version < 21403) return refuse("config: bad size or version");
  return Result::success;
}

inline std::string text_of(const UniqueId& id) {
  return std::string(id.bytes, strnlen(id.bytes, UniqueId::size));
}

// A communicator of `size`, made in the background where it is not blocking.
inline Result make(RawComm* made, const std::string& name, int size, int rank, bool blocking,
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

inline Result init(RawComm* made, int size, const UniqueId& id, int rank,
                   const ConfigRecord* config) {
  const Result result = check_config(config);
  if (result != Result::success) return result;
  return make(made, text_of(id), size, rank, config == nullptr || config->blocking != 0);
}

inline Result random_id(UniqueId* id) {
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
inline bool all_gather_control(Comm& comm, const std::string& mine, std::vector<std::string>* all) {
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

}  // namespace standin
