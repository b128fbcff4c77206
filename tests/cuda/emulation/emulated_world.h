// Ranks of one process: their workspaces, and launches as host threads.
#pragma once

#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cuda/calls.h"
#include "emulated_device.h"

namespace pyparallel::cuda::emulation {

using HostKernel = void (*)(const Call&);

HostKernel host_kernel_of(Op op, DType dtype);

// One launch, recorded: what a captured graph holds.
struct Recorded {
  HostKernel kernel;
  Grid grid;
  Call call;
};

enum class Blocks { together, one_after_another };

// Runs the launch and returns when it has ended: the order of a stream.
inline void run(const Recorded& launch, Blocks blocks = Blocks::together) {
  static std::atomic<unsigned> seed{1};
  const auto threads = static_cast<unsigned>(launch.grid.threads);
  const auto count = static_cast<unsigned>(launch.grid.blocks);
  std::vector<std::unique_ptr<Block>> shared;
  std::vector<std::thread> running;
  const auto join = [&] {
    for (std::thread& t : running) t.join();
    running.clear();
  };
  for (unsigned b = 0; b < count; ++b) {
    shared.push_back(std::make_unique<Block>(threads));
    for (unsigned t = 0; t < threads; ++t) {
      running.emplace_back(
          [&launch, block = shared.back().get(), place = Place{t, threads, b, count}] {
            Thread me{place, block, std::minstd_rand(seed.fetch_add(1))};
            current = &me;
            launch.kernel(launch.call);
          });
    }
    if (blocks == Blocks::one_after_another) join();
  }
  join();
}

inline std::vector<Recorded> record(const Request& request, const Seat& seat) {
  std::vector<Recorded> launches;
  for_each_call(request, seat, [&](const Call& call, Grid grid) {
    launches.push_back({host_kernel_of(request.op, request.dtype), grid, call});
    return 0;
  });
  return launches;
}

// Runs all of them, each on a host thread, and throws the first exception of the first that threw.
inline void at_once(const std::vector<std::function<void()>>& bodies) {
  std::vector<std::exception_ptr> thrown(bodies.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        bodies[i]();
      } catch (...) {
        thrown[i] = std::current_exception();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::exception_ptr& e : thrown) {
    if (e) std::rethrow_exception(e);
  }
}

class World {
 public:
  explicit World(WorkspaceLayout layout) : layout_(layout), pages_(layout.world) {
    for (std::uint32_t r = 0; r < layout.world; ++r) {
      memory_.emplace_back(static_cast<char*>(std::aligned_alloc(kLine, layout.bytes())),
                           std::free);
      std::memset(memory_.back().get(), 0, layout.bytes());
    }
  }

  const WorkspaceLayout& layout() const { return layout_; }
  int size() const { return static_cast<int>(layout_.world); }
  char* memory(int rank) { return memory_[rank].get(); }
  StatusPage& page(int rank) { return pages_[rank]; }

  Seat seat(int rank) {
    Seat seat;
    for (int r = 0; r < size(); ++r) seat.peers[r] = memory(r);
    seat.multicast = memory(0);  // any address: the emulated switch goes rank by rank
    seat.status = &pages_[rank];
    seat.layout = layout_;
    seat.rank = rank;
    return seat;
  }

  // Launches and waits for the end. Throws std::logic_error for a request with a misfit.
  void call(int rank, const Request& request, Blocks blocks = Blocks::together) {
    const Seat own = seat(rank);
    if (const std::string why = request_misfit(request, own); !why.empty()) {
      throw std::logic_error(why);
    }
    for (const Recorded& launch : record(request, own)) run(launch, blocks);
  }

  // One host thread per rank, each doing `body(rank)`.
  void on_all_ranks(const std::function<void(int)>& body) {
    std::vector<std::function<void()>> bodies;
    for (int r = 0; r < size(); ++r) bodies.emplace_back([&body, r] { body(r); });
    at_once(bodies);
  }

 private:
  WorkspaceLayout layout_;
  std::vector<std::unique_ptr<char, void (*)(void*)>> memory_;
  std::vector<StatusPage> pages_;
};

}  // namespace pyparallel::cuda::emulation
