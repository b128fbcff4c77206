// Data calls of the stand-in: checked when made, run on their streams.
#pragma once

#include <algorithm>

#include "comm.h"

extern "C" {
void standinEnqueue(void* stream, void (*call)(void*), void* argument);
int standinDevice();
}

namespace standin {

inline double factor_of(Comm& comm, RedOp red) {
  const std::lock_guard<std::mutex> lock(comm.mutex);
  const auto found = comm.scalars.find(static_cast<int>(red));
  return found != comm.scalars.end() ? found->second.first : 1;
}

inline Result check_data(Comm& comm, const std::string& op, const void* in, const void* out,
                         std::size_t count, DataType type, int root, RedOp red) {
  const bool reads = in != nullptr || count == 0, writes = out != nullptr || count == 0;
  const bool mine = comm.rank == root;
  if (root < 0 || root >= comm.size) return Result::invalid_argument;
  if (!reads && (mine || (op != "Broadcast" && op != "Scatter"))) return Result::invalid_argument;
  if (!writes && (mine || (op != "Reduce" && op != "Gather"))) return Result::invalid_argument;
  const int known = version < 21003 ? 9 : version < 22403 ? 10 : 12;
  if (static_cast<int>(type) < 0 || static_cast<int>(type) >= known)
    return Result::invalid_argument;
  const int code = static_cast<int>(red);
  const std::lock_guard<std::mutex> lock(comm.mutex);
  if (code < 0 || (code > 4 && comm.scalars.count(code) == 0)) return Result::invalid_argument;
  if (code > 4 && comm.scalars[code].second != type) return Result::invalid_argument;
  if (code == 4 && version < 21003) return Result::invalid_argument;
  return Result::success;
}

// What travels before the data, so that a rank that calls something else is found out.
struct Header {
  char op[16] = {};
  std::uint64_t count = 0;
  std::int32_t type = 0, red = 0, root = 0, pad = 0;
};

// Every rank's `bytes` that it has for each other: own[r] goes to r, theirs[r] comes from r.
inline Result swap_all(Comm& comm, const Call& call, std::vector<std::vector<char>>& own,
                       std::vector<std::vector<char>>& theirs) {
  Header mine;
  call.op.copy(mine.op, sizeof mine.op - 1);
  mine.count = call.count;
  mine.type = static_cast<int>(call.type);
  mine.red =
      std::min(static_cast<int>(call.red), 5);  // a PreMulSum has its own number on every rank
  mine.root = call.root;
  std::vector<Header> out(comm.size, mine), in(comm.size);
  std::vector<Transfer> sends, receives;
  for (int r = 0; r < comm.size; ++r) {
    if (r == comm.rank) continue;
    sends.push_back({r, reinterpret_cast<char*>(&out[r]), sizeof mine});
    receives.push_back({r, reinterpret_cast<char*>(&in[r]), sizeof mine});
  }
  if (!exchange(*comm.world, data_channel, comm.rank, sends, receives, comm.stop())) {
    return Result::internal_error;
  }
  for (int r = 0; r < comm.size; ++r) {
    if (r != comm.rank && std::memcmp(&in[r], &mine, sizeof mine) != 0)
      return Result::invalid_usage;
  }
  sends.clear();
  receives.clear();
  theirs[comm.rank] = own[comm.rank];
  for (int r = 0; r < comm.size; ++r) {
    if (r == comm.rank) continue;
    sends.push_back({r, own[r].data(), own[r].size()});
    receives.push_back({r, theirs[r].data(), theirs[r].size()});
  }
  return exchange(*comm.world, data_channel, comm.rank, sends, receives, comm.stop())
             ? Result::success
             : Result::internal_error;
}

inline Result run_collective(Comm& comm, const Call& call) {
  const std::size_t part = call.count * size_of(call.type);
  const bool reduces = call.op == "AllReduce" || call.op == "Reduce" || call.op == "ReduceScatter";
  const bool root = comm.rank == call.root;
  const bool all = call.op == "AllReduce" || call.op == "AllGather";
  const char* in = static_cast<const char*>(call.in);
  char* out = static_cast<char*>(call.out);

  // What each rank gets from this one, by the operation.
  std::vector<std::vector<char>> own(comm.size), theirs(comm.size);
  for (int r = 0; r < comm.size; ++r) {
    const bool parts =
        call.op == "ReduceScatter" || call.op == "AlltoAll" || (call.op == "Scatter" && root);
    const bool whole = all || (call.op == "Broadcast" && root) ||
                       ((call.op == "Reduce" || call.op == "Gather") && r == call.root);
    if (parts) own[r].assign(in + part * r, in + part * (r + 1));
    if (whole) own[r].assign(in, in + part);
    const bool comes = all || call.op == "ReduceScatter" || call.op == "AlltoAll" ||
                       ((call.op == "Broadcast" || call.op == "Scatter") && r == call.root) ||
                       ((call.op == "Reduce" || call.op == "Gather") && root);
    if (comes) theirs[r].resize(part);
  }
  RedOp red = call.red;
  if (reduces && static_cast<int>(red) > 4) {
    red = RedOp::sum;
    for (auto& bytes : own) {
      scale(bytes.data(), bytes.size() / size_of(call.type), call.type, call.factor);
    }
  }
  const Result result = swap_all(comm, call, own, theirs);
  if (result != Result::success || part == 0) return result;
  if (reduces && !theirs[0].empty()) {
    reduce(theirs, out, call.count, call.type, red);
  } else if (!reduces) {
    const bool one = call.op == "Broadcast" || call.op == "Scatter";
    for (int r = 0; r < comm.size; ++r) {
      if (!theirs[r].empty()) std::memcpy(out + (one ? 0 : part * r), theirs[r].data(), part);
    }
  }
  return Result::success;
}

inline Result run_p2p(Comm& comm, Call& call) {
  // To itself: by a copy, in order.
  std::vector<Transfer> sends, receives, own_in, own_out;
  for (const Transfer& t : call.sends) (t.peer == comm.rank ? own_out : sends).push_back(t);
  for (const Transfer& t : call.receives) (t.peer == comm.rank ? own_in : receives).push_back(t);
  if (own_in.size() != own_out.size()) return Result::invalid_usage;
  for (std::size_t i = 0; i < own_in.size(); ++i) {
    if (own_in[i].size != own_out[i].size) return Result::invalid_usage;
    std::memmove(own_in[i].bytes, own_out[i].bytes, own_in[i].size);
  }
  return exchange(*comm.world, data_channel, comm.rank, sends, receives, comm.stop())
             ? Result::success
             : Result::internal_error;
}

// Taken in by the peer's wait. To itself: at once.
inline Result run_put(Comm& comm, Call& call) {
  char* const bytes = static_cast<char*>(const_cast<void*>(call.in));
  const Put& put = call.put;
  if (call.root == comm.rank) {
    const std::lock_guard<std::mutex> lock(comm.mutex);
    if (put.bytes > 0) std::memcpy(comm.windows[put.window].data + put.offset, bytes, put.bytes);
    ++comm.signals[{comm.rank, put.signal, put.context}];
    return Result::success;
  }
  std::vector<Transfer> none;
  std::vector<Transfer> out{{call.root, reinterpret_cast<char*>(&call.put), sizeof put},
                            {call.root, bytes, put.bytes}};
  return exchange(*comm.world, put_channel, comm.rank, out, none, comm.stop())
             ? Result::success
             : Result::internal_error;
}

inline Result run_wait(Comm& comm, const Call& call) {
  for (const WaitSignalRecord& wait : call.waits) {
    for (int left = wait.count; left > 0;) {
      {
        const std::lock_guard<std::mutex> lock(comm.mutex);
        int& come = comm.signals[{wait.peer, wait.signal, wait.context}];
        const int taken = std::min(come, left);
        come -= taken;
        left -= taken;
      }
      if (left == 0) break;
      if (wait.peer == comm.rank) return Result::invalid_usage;  // nobody is left to signal
      Put put{};
      std::vector<Transfer> none, in{{wait.peer, reinterpret_cast<char*>(&put), sizeof put}};
      if (!exchange(*comm.world, put_channel, comm.rank, none, in, comm.stop()))
        return Result::internal_error;
      std::vector<Transfer> data{
          {wait.peer, put.window < 0 ? nullptr : comm.windows[put.window].data + put.offset,
           put.bytes}};
      if (!exchange(*comm.world, put_channel, comm.rank, none, data, comm.stop()))
        return Result::internal_error;
      const std::lock_guard<std::mutex> lock(comm.mutex);
      ++comm.signals[{wait.peer, put.signal, put.context}];
    }
  }
  return Result::success;
}

inline void run(void* argument) {
  const std::unique_ptr<Call> call(static_cast<Call*>(argument));
  Comm& comm = *call->comm;
  const Result result = call->op == "p2p"    ? run_p2p(comm, *call)
                        : call->op == "put"  ? run_put(comm, *call)
                        : call->op == "wait" ? run_wait(comm, *call)
                                             : run_collective(comm, *call);
  if (comm.interrupted) {  // revoked: ended, which is no failure
    --comm.running;
    return;
  }
  if (result != Result::success) comm.state = static_cast<int>(result);
  --comm.running;
}

// Sends and receives of one communicator and stream become one call, after the collectives.
inline Result launch(std::vector<Call> calls) {
  std::vector<Call> merged;
  std::map<std::pair<Comm*, Stream>, Call> p2p;
  for (Call& call : calls) {
    if (call.op != "p2p") {
      merged.push_back(std::move(call));
      continue;
    }
    Call& all = p2p[{call.comm.get(), call.stream}];
    all.comm = call.comm;
    all.stream = call.stream;
    all.op = "p2p";
    all.sends.insert(all.sends.end(), call.sends.begin(), call.sends.end());
    all.receives.insert(all.receives.end(), call.receives.begin(), call.receives.end());
  }
  for (auto& [key, call] : p2p) merged.push_back(std::move(call));

  Result result = Result::success;
  for (Call& call : merged) {
    Comm& comm = *call.comm;
    if (std::string(fault) ==
        "hang_launch") {  // as when a blocking library connects to a stuck peer
      ++comm.running;
      wait_until([] { return false; }, comm.stop());
      --comm.running;
      return Result::internal_error;
    }
    if (!comm.blocking && comm.slow_start) {  // as when the library connects at the first use
      comm.slow_start = false;
      comm.state = static_cast<int>(Result::in_progress);
      result = Result::in_progress;
      ++comm.running;
      std::thread([owner = call.comm] {
        ::usleep(5000);
        int expected = static_cast<int>(Result::in_progress);
        owner->state.compare_exchange_strong(expected, 0);
        --owner->running;
      }).detach();
    }
    ++comm.running;
    standinEnqueue(call.stream, &run, new Call(std::move(call)));
  }
  return result;
}

}  // namespace standin
