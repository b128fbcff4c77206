// The binding's C++ under sanitizers, with threads as ranks over a stand-in of the same kind: data
// calls, groups, children, and ends that come from all sides at once.
//   native LIBRARY DRIVER
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "nccl/communicator.h"
#include "nccl/driver.h"
#include "nccl/group.h"
#include "nccl/memory.h"
#include "tests/native/check.h"

extern "C" int standinSynchronize(void* stream, int milliseconds) __attribute__((weak));

namespace {

using namespace pyparallel;
using namespace pyparallel::nccl;
using std::chrono::milliseconds;

constexpr int ranks = 3;
std::shared_ptr<const Library> library;
std::atomic<std::uintptr_t> next_stream{16};

Options options(bool blocking, milliseconds timeout = milliseconds(30000)) {
  Options made;
  made.timeout = timeout;
  made.blocking = blocking;
  return made;
}

using Body = std::function<void(const std::shared_ptr<Communicator>&, Stream)>;

void run(bool blocking, milliseconds timeout, const Body& body) {
  const UniqueId id = make_unique_id(*library);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(Communicator::init(library, {id}, rank, ranks, options(blocking, timeout)),
             reinterpret_cast<Stream>(next_stream.fetch_add(16)));
      } catch (const std::exception& error) {
        check::that(false, "rank ", rank, ": ", error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

template <typename Call>
std::string text_of_error(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

const Element f32 = *element_named("float32");

// Sums, groups, uneven calls, a child, memory; then everyone closes.
void work(const std::shared_ptr<Communicator>& comm, Stream stream) {
  std::vector<float> x(100), all(300), parts(300), got(300);
  for (int round = 0; round < 20; ++round) {
    std::iota(x.begin(), x.end(), static_cast<float>(comm->rank() + round));
    std::iota(parts.begin(), parts.end(), static_cast<float>(1000 * comm->rank()));
    {
      Group group;
      comm->all_reduce(x.data(), x.data(), x.size(), f32, {ReduceOp::sum, nullptr}, stream);
      comm->all_to_all(parts.data(), got.data(), 100, f32, stream);
      group.run();
    }
    std::vector<Block> blocks;
    for (int r = 0; r < ranks; ++r)
      blocks.push_back({all.data() + 100 * r, 50U * static_cast<unsigned>(r)});
    comm->all_gather(x.data(), blocks, f32, stream);
    const auto half = PreMulSum::make(comm, 0.5, f32);
    comm->all_reduce(x.data(), x.data(), x.size(), f32, {ReduceOp::premul_sum, half}, stream);
    check::that(standinSynchronize(stream, 20000) != 0, "the stream is stuck");
    const float sum = 3.0F * (7 + static_cast<float>(round)) + 3;
    check::that(x[7] == 1.5F * sum, "sum ", x[7], " for ", 1.5F * sum);
    check::that(all[100] == sum - 21 && all[200] == sum - 21, "gathered ", all[100]);
    check::that(got[100] == 1000.0F + 100.0F * static_cast<float>(comm->rank()), "swapped ",
                got[100]);
  }
  const auto child = comm->split(0, -comm->rank());
  check::that(child->rank() == ranks - 1 - comm->rank(), "rank of the child ", child->rank());
  Memory memory(library, 8192);
  {
    Registration registration(comm, memory.data(), 4096);
    Window window(comm, static_cast<char*>(memory.data()) + 4096, 4096, window_symmetric);
    check::that(registration.open() && window.open(), "registered");
  }
  child->close(Deadline::after(milliseconds(20000)));
  comm->close(Deadline::after(milliseconds(20000)));
  check::that(!text_of_error([&] { comm->split(0, 0); }).empty(), "used after close");
}

// Two threads call, a third looks, a fourth aborts: every call ends, with a result or the reason.
void attack(const std::shared_ptr<Communicator>& comm, Stream stream) {
  std::atomic<bool> stop{false};
  std::vector<std::vector<float>> data(2, std::vector<float>(64));
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      while (!stop) {
        const std::string error = text_of_error([&] {
          comm->all_reduce(data[t].data(), data[t].data(), 64, f32, {ReduceOp::sum, nullptr},
                           stream);
        });
        if (!error.empty()) {
          check::that(error.find("enough") != std::string::npos, error);
          return;
        }
      }
    });
  }
  threads.emplace_back([&] {
    while (!stop) {
      static_cast<void>(comm->failure() + std::to_string(comm->sequence()));
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  std::this_thread::sleep_for(milliseconds(100));
  check::that(comm->abort("enough", Deadline::after(milliseconds(20000))), "abort did not return");
  stop = true;
  for (std::thread& thread : threads) thread.join();
  comm->close(Deadline::after(milliseconds(1000)));
  check::that(standinSynchronize(stream, 20000) != 0, "the stream is stuck");
}

// Rank 0 launches, the others never do: the watchdog ends it. The others are dropped.
void absent(const std::shared_ptr<Communicator>& comm, Stream stream) {
  if (comm->rank() != 0) {
    std::this_thread::sleep_for(milliseconds(600));
    return;
  }
  float x = 1;
  comm->all_reduce(&x, &x, 1, f32, {ReduceOp::sum, nullptr}, stream);
  for (int i = 0; i < 1000 && comm->failure().empty(); ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  check::that(comm->failure().find("is not done after 0.3 s") != std::string::npos,
              comm->failure());
  check::that(standinSynchronize(stream, 20000) != 0, "the stream is stuck");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  use_driver(argv[2]);
  library = Library::open({argv[1], {}, {}});
  for (const bool blocking : {false, true}) {
    run(blocking, milliseconds(30000), work);
    run(blocking, milliseconds(30000), attack);
    run(blocking, milliseconds(300), absent);
  }
  process_ends(Deadline::after(milliseconds(20000)));
  return check::finish("nccl");
}
