// What the stand-in for libcuda.so.1 (standin_cuda.cpp) keeps, and what its functions share.
// Included there only.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "symmetric/cuda_abi.h"

using namespace pyparallel::symmetric::cuda;

#define PYPARALLEL_DECLARE(name, feature, parameters) extern "C" Result name parameters;
PYPARALLEL_CUDA_DRIVER_SYMBOLS(PYPARALLEL_DECLARE)
#undef PYPARALLEL_DECLARE

namespace {

constexpr std::size_t kGranularity = std::size_t{1} << 21;
constexpr std::size_t kMulticastGranularity = std::size_t{1} << 22;
constexpr std::size_t kPage = 4096;

// First page of a multicast object's file, shared between the processes.
struct MulticastState {
  unsigned devices;
  std::size_t size;
  std::atomic<unsigned> added, bound;
};

struct Object {
  int fd = -1;
  std::size_t bytes = 0;
  int users = 0;  // the handle, and mappings of it
  int handle_type = 0;
  MulticastState* multicast = nullptr;
  bool has_fd = true;
};

struct State {
  std::mutex mutex;
  std::map<Handle, Object> objects;
  Handle next = 1;
  std::map<Address, std::size_t> reserved, allocations, opened;
  std::map<Address, Handle> mapped;
  std::map<Address, int> allocation_fds;
  int contexts = 0, current = 0, bindings = 0;
};
State& state() {
  static State* s = new State;
  return *s;
}

std::string variable(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value == nullptr ? fallback : value;
}

bool lacks(const char* what) {
  return (" " + variable("STANDIN_CUDA_LACKS", "") + " ").find(std::string(" ") + what + " ") !=
         std::string::npos;
}

// What the test wants this call to give; 0 where nothing.
Result wanted(const char* call) {
  if (variable("STANDIN_CUDA_DIE", "") == call) raise(SIGKILL);
  const std::string list = " " + variable("STANDIN_CUDA_FAIL", "");
  const std::string key = std::string(" ") + call + ":";
  const std::size_t at = list.find(key);
  return at == std::string::npos ? kSuccess : std::atoi(list.c_str() + at + key.size());
}

int device_count() { return std::atoi(variable("STANDIN_CUDA_DEVICES", "8").c_str()); }

#define STANDIN_BEGIN                                    \
  if (Result result_ = wanted(__func__)) return result_; \
  std::lock_guard<std::mutex> lock(state().mutex)

#define STANDIN_REQUIRE(condition) \
  if (!(condition)) return kInvalidValue

std::size_t size_of_file(int fd) {
  struct stat info{};
  return fstat(fd, &info) == 0 ? static_cast<std::size_t>(info.st_size) : 0;
}

bool is_multicast_file(int fd) {
  char link[64] = {}, target[256] = {};
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  return readlink(link, target, sizeof target - 1) > 0 &&
         std::strstr(target, "standin-mc") != nullptr;
}

void release_object(Handle handle) {
  auto found = state().objects.find(handle);
  if (--found->second.users > 0) return;
  if (found->second.multicast != nullptr) munmap(found->second.multicast, kPage);
  close(found->second.fd);
  state().objects.erase(found);
}

Handle add_object(int fd, int handle_type) {
  Object object;
  object.fd = fd;
  object.users = 1;
  object.handle_type = handle_type;
  object.bytes = size_of_file(fd);
  if (is_multicast_file(fd)) {
    object.multicast = static_cast<MulticastState*>(
        mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    object.bytes -= kPage;
  }
  const Handle handle = state().next++;
  state().objects[handle] = object;
  return handle;
}

// A file of another process: what fabric and IPC handles name.
struct Remote {
  int pid;
  int fd;
  std::size_t bytes;
};
int open_remote(const void* bytes, Remote* remote) {
  std::memcpy(remote, bytes, sizeof *remote);
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", remote->pid, remote->fd);
  return open(path, O_RDWR | O_CLOEXEC);
}

}  // namespace
