// csrc/shm's communicator with threads as ranks: random calls, stragglers, more ranks than cores.
// Under ThreadSanitizer a missing release or acquire is a failure even where all results are right.

#include <dirent.h>
#include <unistd.h>

#include "collective_cases.h"
#include "shm/layout.h"
#include "symmetric/registry.h"

using namespace ranks;
using pyparallel::Status;
using pyparallel::shm::Layout;

namespace {

std::uint64_t seed;

void random_calls(int n, int calls, std::size_t largest) {
  run("random calls", n, [&](std::shared_ptr<Communicator> comm) {
    Numbers mine(seed, 77, static_cast<std::uint64_t>(comm->rank()));
    for (int i = 0; i < calls; ++i) {
      stray(mine);
      OneCall(*comm, {seed, static_cast<std::uint64_t>(i), largest}).make();
    }
    check::that(comm->sequence() == static_cast<std::uint64_t>(calls), "sequence ",
                comm->sequence());
  });
}

// Blocks that are staged before the call is announced, between others that fill the staging: what
// one call stages may not lie where a slow rank still reads the last one's.
void whole_moves(int n, int calls) {
  run("whole moves", n, [&](std::shared_ptr<Communicator> comm) {
    const int me = comm->rank();
    // Of 3 ranks the last of these five would come to lie on the fourth's slots.
    constexpr std::size_t sizes[] = {131072, 32768, 5000, 131072, 32768};
    Numbers common(seed + 9), mine(seed + 10, static_cast<std::uint64_t>(me));
    for (int i = 0; i < calls; ++i) {
      const std::size_t count = sizes[i % 5] - common.below(200);
      const auto block = [&](int from, int to) {
        std::uint64_t word = Numbers(seed + 11, static_cast<std::uint64_t>(i),
                                     static_cast<std::uint64_t>(from * n + to))
                                 .next();
        std::vector<std::uint64_t> words(count);
        for (std::uint64_t& one : words) one = word += 0x9e3779b97f4a7c15;
        return words;
      };
      std::vector<std::vector<std::uint64_t>> in, out;
      std::vector<ConstBlock> send;
      std::vector<Block> receive;
      for (int r = 0; r < n; ++r) {
        in.push_back(block(me, r));
        out.emplace_back(count, 0xa5a5a5a5a5a5a5a5);
      }
      for (std::size_t r = 0; r < in.size(); ++r) {
        send.push_back({in[r].data(), count});
        receive.push_back({out[r].data(), count});
      }
      stray(mine);
      comm->all_to_all(send.data(), receive.data(), DType::i64, soon());
      for (int r = 0; r < n; ++r)
        check::that(out[static_cast<std::size_t>(r)] == block(r, me), "call ", i, " of ", count,
                    " elements, from ", r);
    }
  });
}

// Two communicators of the same ranks, each driven by a thread of its own, and messages on a third.
void several_at_once(int n, int calls) {
  run("several", n, [&](std::shared_ptr<Communicator> comm) {
    const auto first = comm->split(0, comm->rank(), {"first", kTimeout});
    const auto second = comm->split(0, -comm->rank(), {"second", kTimeout});
    check::that(second->rank() == n - 1 - comm->rank(), "split by key");
    const auto part = comm->split(comm->rank() % 2, 0, {"part", kTimeout});
    const auto none = comm->split(comm->rank() == 0 ? -1 : 0, 0, {"all but 0", kTimeout});
    check::that((none == nullptr) == (comm->rank() == 0), "split without a color");
    std::vector<Communicator*> groups = {first.get(), second.get(), part.get()};
    on_threads("driver", static_cast<int>(groups.size()), [&](int g) {
      for (int i = 0; i < calls; ++i)
        OneCall(*groups[g], {seed + 1, static_cast<std::uint64_t>(i), std::size_t{100000}}).make();
    });
  });
}

// All pairs exchange messages of all sizes at once; every second round with blocking sends first,
// more than fits the rings.
void messages(int n, int rounds) {
  run("messages", n, [&](std::shared_ptr<Communicator> comm) {
    const int me = comm->rank();
    const auto size = [&](int round, int from, int to) {
      Numbers numbers(seed + 5, static_cast<std::uint64_t>(round),
                      static_cast<std::uint64_t>(from * n + to));
      return numbers.one_in(4) ? numbers.below(400000) : numbers.below(3000);
    };
    const auto message = [&](int round, int from, int to) {
      return data(Numbers(seed + 6, static_cast<std::uint64_t>(round),
                          static_cast<std::uint64_t>(from * n + to)),
                  DType::f32, size(round, from, to));
    };
    Numbers mine(seed, 78, static_cast<std::uint64_t>(me));
    for (int round = 0; round < rounds; ++round) {
      std::vector<std::vector<std::byte>> out, in;
      std::vector<std::shared_ptr<Work>> works;
      for (int r = 0; r < n; ++r) {
        out.push_back(message(round, me, r));
        in.emplace_back(size(round, r, me) * 4, std::byte{0xa5});
      }
      for (int i = 0; i < n; ++i) {
        const int to = (me + i) % n;
        stray(mine);
        if (round % 2 == 0) {
          works.push_back(comm->isend(out[to].data(), out[to].size() / 4, DType::f32, to, round));
        } else if (to != me) {
          comm->send(out[to].data(), out[to].size() / 4, DType::f32, to, round, soon());
        }
      }
      for (int i = 0; i < n; ++i) {
        const int from = (me + n - i) % n;
        if (round % 2 == 0) {
          works.push_back(
              comm->irecv(in[from].data(), in[from].size() / 4, DType::f32, from, round));
        } else if (from != me) {
          comm->recv(in[from].data(), in[from].size() / 4, DType::f32, from, round, soon());
        }
      }
      for (auto& work : works) work->wait(soon());
      for (int r = 0; r < n; ++r)
        if (round % 2 == 0 || r != me)
          check::that(in[r] == message(round, r, me), "message ", r, " -> ", me, " round ", round);
    }
    // Tags taken in the opposite order, and from any source.
    comm->barrier(soon());
    if (me == 0) {
      for (int tag = 9; tag >= 0; --tag) {
        std::vector<bool> came(static_cast<std::size_t>(n), false);
        for (int i = 1; i < n; ++i) {
          int value = -1;
          const int from = comm->recv(&value, 1, DType::i32, Communicator::any_source, tag, soon());
          check::that(value == from * 100 + tag, "tag ", tag, " from ", from, ": ", value);
          check::that(!came[static_cast<std::size_t>(from)], "twice from ", from);
          came[static_cast<std::size_t>(from)] = true;
        }
      }
    } else {
      for (int tag = 0; tag < 10; ++tag) {
        const int value = me * 100 + tag;
        comm->send(&value, 1, DType::i32, 0, tag, soon());
      }
    }
  });
}

// Several threads of each rank use one communicator: messages of different tags, and collectives of
// one shape (which of them meets which does not matter).
void one_seat_for_many_threads(int n, int rounds) {
  run("shared seat", n, [&](std::shared_ptr<Communicator> comm) {
    const int me = comm->rank();
    on_threads("thread", 4, [&](int thread) {
      for (int round = 0; round < rounds; ++round) {
        if (thread < 2) {
          std::int64_t one = 1;
          comm->all_reduce(&one, &one, 1, DType::i64, {}, soon());
          check::that(one == n, "all_reduce among threads: ", one);
          continue;
        }
        std::vector<int> out(round % 3 == 0 ? 100000 : 10, me * 1000 + thread), in(out.size(), -1);
        auto sent = comm->isend(out.data(), out.size(), DType::i32, (me + 1) % n, thread);
        const int from = (me + n - 1) % n;
        comm->recv(in.data(), in.size(), DType::i32, from, thread, soon());
        sent->wait(soon());
        check::that(in.front() == from * 1000 + thread && in.back() == in.front(), "message to ",
                    thread, ": ", in.front());
      }
    });
  });
}

// Queued calls run in order, with synchronous ones between them, while messages pass.
void asynchronous(int n, int rounds) {
  run("async", n, [&](std::shared_ptr<Communicator> comm) {
    for (int round = 0; round < rounds; ++round) {
      constexpr int queued = 6;
      std::vector<std::vector<float>> arrays(queued, std::vector<float>(5000));
      std::vector<std::shared_ptr<Work>> works;
      for (int q = 0; q < queued; ++q) {
        for (auto& x : arrays[q]) x = static_cast<float>(comm->rank() + q);
        works.push_back(comm->enqueue([&comm, &array = arrays[q]] {
          comm->all_reduce(array.data(), array.data(), array.size(), DType::f32, {}, soon());
        }));
      }
      std::int64_t one = 1;
      comm->all_reduce(&one, &one, 1, DType::i64, {}, soon());
      check::that(one == n, "the synchronous call: ", one);
      check::that(works.back()->done(), "a synchronous call overtook a queued one");
      const int next = (comm->rank() + 1) % n;
      auto sent = comm->isend(&round, 1, DType::i32, next, 3);
      for (int q = queued - 1; q >= 0; --q) {
        works[static_cast<std::size_t>(q)]->wait(soon());
        const float expected = static_cast<float>(n * (n - 1) / 2 + q * n);
        check::that(arrays[q].front() == expected && arrays[q].back() == expected, "queued ", q);
      }
      int got = -1;
      comm->recv(&got, 1, DType::i32, (comm->rank() + n - 1) % n, 3, soon());
      sent->wait(soon());
      check::that(got == round, "message beside queued calls: ", got);
    }
  });
}

// The buffer is memory that all ranks see: no copies. (Threads share it trivially.)
void symmetric_buffers(int n) {
  constexpr std::size_t count = 30000;
  std::vector<std::vector<float>> regions(n, std::vector<float>(count));
  std::vector<std::byte*> bases;
  for (auto& region : regions) bases.push_back(reinterpret_cast<std::byte*>(region.data()));
  std::vector<pyparallel::symmetric::Registration> kept;
  for (int r = 0; r < n; ++r) {
    pyparallel::symmetric::SymmetricRange range;
    range.segment = 42;
    range.rank = r;
    range.size = n;
    range.bytes = count * sizeof(float);
    range.bases = bases.data();
    kept.emplace_back(range);
  }
  run("symmetric", n, [&](std::shared_ptr<Communicator> comm) {
    std::vector<float>& mine = regions[static_cast<std::size_t>(comm->rank())];
    for (int round = 0; round < 6; ++round) {
      std::vector<float> expected(count, 0);
      for (std::size_t i = 0; i < count; ++i) {
        mine[i] = static_cast<float>(i % 97) + static_cast<float>(comm->rank() * (round + 1));
        for (int r = 0; r < n; ++r)
          expected[i] += static_cast<float>(i % 97) + static_cast<float>(r * (round + 1));
      }
      comm->all_reduce(mine.data(), mine.data(), count, DType::f32, {}, soon());
      check::that(mine == expected, "symmetric round ", round);
    }
  });
}

// Also with the most ranks a chunk has room for something: no step of zero elements.
void layouts() {
  for (int n = 1; n <= Layout::max_ranks; ++n) {
    const std::size_t parts = Layout::staging_slots * (static_cast<std::size_t>(n) + 1);
    check::that(Layout(n).staging_bytes() / parts >= 64, "a part of staging with ", n, " ranks");
  }
}

std::size_t open_descriptors() {
  std::size_t count = 0;
  DIR* dir = ::opendir("/proc/self/fd");
  while (::readdir(dir) != nullptr) ++count;
  ::closedir(dir);
  return count;
}

void cycles(int times) {
  run("warm up", 2, [](std::shared_ptr<Communicator> comm) { comm->barrier(soon()); });
  const std::size_t before = open_descriptors();
  for (int i = 0; i < times; ++i) {
    run("cycle", 2 + i % 3, [&](std::shared_ptr<Communicator> comm) {
      comm->barrier(soon());
      if (i % 2 == 0) comm->close();
      comm->close();
    });
  }
  // Threads that end in their own time may hold the last ones for a moment.
  for (int i = 0; i < 100 && open_descriptors() > before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  check::that(open_descriptors() <= before, "descriptors: ", before, " before, ",
              open_descriptors(), " after ", times, " communicators");
}

}  // namespace

#include "failure_cases.h"

int main(int argc, char** argv) {
  ::alarm(290);  // nothing here may hang
  auto generator = check::generator(argc, argv);
  seed = generator();
  layouts();
  for (int n : {1, 2, 3, 4, 7}) random_calls(n, n == 7 ? 20 : 50, n == 2 ? 1500000 : 300000);
  for (int n : {2, 3}) whole_moves(n, 40);
  for (int n : {2, 3}) several_at_once(n, 25);
  for (int n : {2, 3, 5}) messages(n, 6);
  for (int n : {2, 3}) one_seat_for_many_threads(n, 12);
  for (int n : {2, 4}) asynchronous(n, 5);
  for (int n : {2, 3}) symmetric_buffers(n);
  for (int n : {2, 3, 6}) failures(n);
  cycles(60);
  return check::finish("communicator");
}
