// What the stand-in keeps of a communicator, of a thread's group, and for the tests.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "arithmetic.h"
#include "nccl/symbols.h"
#include "world.h"

namespace standin {

using namespace pyparallel::nccl;

// variant.cpp
extern const int version;
extern const char* const fault;

struct Comm {
  std::string name;  // of its world
  int rank = 0, size = 0, device = 0;
  bool blocking = true;
  World* world = nullptr;
  std::atomic<int> state{0};  // Result of background work
  std::atomic<bool> aborted{false};
  std::atomic<int> running{0};  // operations on streams, and jobs
  std::atomic<bool> finalized{false};
  bool slow_start = true;  // the first data call of a non-blocking one is finished later
  int children = 0;
  std::mutex mutex;
  std::map<int, std::pair<double, DataType>> scalars;  // of PreMulSum
  int next_scalar = 5;
  std::set<void*> registered;
  struct Window {
    void* handle;
    char* data;
    std::size_t bytes;
  };
  std::vector<Window> windows;  // in order of registration, which all ranks share
  // Signals that have come and were not waited for: by sender, signal and context.
  std::map<std::array<int, 3>, int> signals;
  std::atomic<bool> revoked{false}, suspended{false};
  std::atomic<bool> interrupted{false};  // what runs is to end

  Stop stop() {
    return [this] { return aborted.load() || interrupted.load(); };
  }
  Stop stop_of_life() {
    return [this] { return aborted.load(); };
  }
  int number_of_window(void* handle, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (std::size_t i = 0; i < windows.size(); ++i)
      if (windows[i].handle == handle && bytes <= windows[i].bytes) return static_cast<int>(i);
    return -1;
  }
};

// What a put tells the peer before its data; window -1: a signal alone.
struct Put {
  int signal, context, window;
  std::size_t offset, bytes;
};

// One data call, as it will run on its stream.
struct Call {
  std::shared_ptr<Comm> comm;
  Stream stream;
  std::string op;  // "AllReduce", or "p2p" for all sends and receives of a group
  std::size_t count = 0;
  DataType type = DataType::u8;
  RedOp red = RedOp::sum;
  int root = 0;
  std::vector<Transfer> sends, receives;
  const void* in = nullptr;
  void* out = nullptr;
  double factor = 1;  // of a PreMulSum, which may be destroyed once the call has returned
  Put put{};          // of "put", to `root`
  std::vector<WaitSignalRecord> waits;
};

struct Group {
  int depth = 0;
  Result error = Result::success;
  std::vector<Call> calls;
};

struct Tests {
  std::mutex mutex;
  std::string log;                        // names of the functions called, one a line
  std::map<std::string, Result> results;  // injected
  std::map<RawComm, std::shared_ptr<Comm>> comms;
  std::string last_error, last_config;
  std::atomic<bool> let_go{false};  // ends the fault "hang_abort"
};

inline Tests& tests() {
  static auto* all = new Tests;
  return *all;
}

inline thread_local Group group;

}  // namespace standin
