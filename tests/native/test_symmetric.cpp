// csrc/symmetric without processes: integers, the registry, the choice of sharing, and ranks as
// threads that allocate, signal, fail and leave (for the sanitizers).
#include <algorithm>
#include <exception>
#include <map>
#include <thread>
#include <vector>

#include "check.h"
#include "symmetric/agreement.h"
#include "symmetric/allocator.h"
#include "symmetric/device_choice.h"
#include "symmetric/fd_exchange.h"
#include "symmetric/layout.h"
#include "symmetric/registry.h"
#include "symmetric/symmetric_memory.h"

namespace {

using namespace pyparallel;
using namespace pyparallel::symmetric;
using std::chrono::milliseconds;

template <typename E, typename F>
std::string thrown(F&& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    check::that(false, "another class: ", error.what());
    return {};
  }
  check::that(false, "nothing was thrown");
  return {};
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// Blocks, data and signal lines are disjoint and in bounds, for sizes far beyond 32 bits too.
void layouts() {
  for (int size : {1, 2, 3, 8, 260})
    for (std::size_t bytes : {std::size_t{1}, std::size_t{4095}, std::size_t{4097},
                              (std::size_t{1} << 31) + 1, std::size_t{3} << 40})
      for (int channels : {1, 3, 16})
        for (std::size_t granularity : {std::size_t{4096}, std::size_t{1} << 21}) {
          const Layout l = Layout::make(size, bytes, channels, granularity);
          check::that(l.bytes >= bytes && l.bytes % kUnit == 0, "data ", l.bytes);
          check::that(l.block % granularity == 0 && l.bytes + l.signal_bytes == l.block, "block");
          check::that(l.block < bytes + l.signal_bytes + granularity + kUnit, "waste ", l.block);
          check::that(l.total() / static_cast<std::size_t>(size) == l.block, "total wraps");
          check::that(l.signal(0, 0) == l.signal_page() && l.signal_page() == l.bytes, "page");
          const std::size_t last = l.signal(channels - 1, size - 1);
          check::that(last + 2 * kLine <= l.block, "the seat line lies outside");
          check::that(size == 1 || l.signal(0, 1) - l.signal(0, 0) == kLine, "line");
        }
  const std::size_t top = ~std::size_t{0};
  for (std::size_t bytes : {top, top / 2, top / 4})
    check::that(has(thrown<InvalidArgument>([&] { Layout::make(3, bytes, 1, 4096); }),
                    "exceed the address space"),
                "bytes ", bytes);
  thrown<InvalidArgument>([] { Layout::make(0, 1, 1, 4096); });
  thrown<InvalidArgument>([] { Layout::make(2, 0, 1, 4096); });
  thrown<InvalidArgument>([] { Layout::make(2, 1, 0, 4096); });
  thrown<InvalidArgument>([] { Layout::make(2, 1, 1, 5000); });
  thrown<InvalidArgument>([] { Layout::make(1 << 20, 1, 1, 4096); });
}

// Random allocations against a model: aligned, disjoint, in bounds, and refused only without a
// hole.
void allocators(std::mt19937_64& random) {
  OffsetAllocator allocator(1 << 16), twin(1 << 16);
  std::map<std::size_t, std::size_t> taken;
  for (int step = 0; step < 4000; ++step) {
    if (!taken.empty() && random() % 3 == 0) {
      auto one = std::next(taken.begin(), static_cast<long>(random() % taken.size()));
      check::that(allocator.size_at(one->first) == one->second, "size_at");
      check::that(allocator.release(one->first) && twin.release(one->first), "release");
      check::that(!allocator.release(one->first), "released twice");
      taken.erase(one);
      continue;
    }
    const std::size_t bytes = random() % 5000, alignment = std::size_t{1} << random() % 13;
    const auto got = allocator.allocate(bytes, alignment);
    check::that(got == twin.allocate(bytes, alignment), "two ranks differ");
    const std::size_t length = std::max<std::size_t>(bytes, 1);
    if (!got) {
      std::size_t start = 0;
      bool room = false;
      auto fits = [&](std::size_t end) {
        const std::size_t from = (start + alignment - 1) / alignment * alignment;
        return from + length <= end;
      };
      for (auto [offset, size] : taken) {
        room = room || fits(offset);
        start = offset + size;
      }
      check::that(!room && !fits(1 << 16), "refused although there is room");
      continue;
    }
    check::that(*got % alignment == 0 && *got + length <= (1 << 16), "place");
    auto next = taken.lower_bound(*got);
    check::that(next == taken.end() || *got + length <= next->first, "overlaps the next");
    check::that(next == taken.begin() || std::prev(next)->first + std::prev(next)->second <= *got,
                "overlaps the one before");
    taken[*got] = length;
  }
  std::size_t used = 0;
  for (auto [offset, size] : taken) used += size;
  check::that(allocator.used() == used, "used");
}

void registries() {
  std::vector<std::byte> memory(4096);
  std::byte* bases[2] = {memory.data() + 1024, memory.data() + 2048};
  SymmetricRange out, region;
  check::that(!find(memory.data(), 1, &out), "found in an empty registry");
  region.segment = 7;
  region.size = 2;
  region.bytes = 1024;
  region.bases = bases;
  {
    Registration first(region);
    region.rank = 1;
    Registration second(region);
    check::that(registered() == 2, "registered");
    check::that(find(bases[0], 1024, &out) && out.rank == 0 && out.offset == 0, "whole region");
    check::that(!find(bases[0], 1025, &out), "across the end");
    check::that(
        find(bases[1] + 1000, 4, &out) && out.rank == 1 && out.offset == 1000 && out.bytes == 24,
        "inside");
    check::that(!find(bases[0] - 1, 1, &out) && !find(bases[1] + 1024, 1, &out), "outside");
    thrown<Error>([&] { Registration again(region); });
    Registration moved = std::move(first);
    check::that(registered() == 2, "moving registers nothing");
  }
  check::that(registered() == 0 && !find(bases[0], 1, &out), "left behind");
}

// What every rank says in, what all do out: each lack costs only itself, with its ranks named.
void choices() {
  DeviceFacts whole;
  whole.posix_fd = whole.fabric = whole.ipc = whole.multicast = 1;
  whole.granularity = 1 << 21;
  whole.multicast_granularity = 1 << 22;
  std::vector<DeviceFacts> facts(3, whole);
  for (int r = 0; r < 3; ++r)
    facts[static_cast<std::size_t>(r)].uuid.bytes[0] = static_cast<char>(r);
  auto all = choose(facts, true);
  check::that(all.multicast && all.notes.empty() && all.granularity == 1 << 22, all.notes);
  check::that(all.shares == std::vector<Share>{Share::posix_fd, Share::fabric, Share::cuda_ipc},
              "order");
  facts[1].multicast = 0;
  auto no_multicast = choose(facts, true);
  check::that(!no_multicast.multicast && no_multicast.shares.size() == 3 &&
                  has(no_multicast.notes, "rank 1 lacks it") && no_multicast.granularity == 1 << 21,
              no_multicast.notes);
  facts[1].multicast = 1;
  facts[2].posix_fd = 0;
  check::that(choose(facts, true).shares.front() == Share::fabric, "next best");
  facts[0].fabric = 0;
  auto ipc = choose(facts, true);
  check::that(ipc.shares == std::vector<Share>{Share::cuda_ipc} && !ipc.multicast &&
                  has(ipc.notes, "it needs memory as handles"),
              ipc.notes);
  facts[1].ipc = 0;
  check::that(choose(facts, true).shares.empty(), "nothing");
  std::vector<DeviceFacts> shared(2, whole);
  check::that(has(choose(shared, true).notes, "share a device"), "same uuid");
  check::that(has(choose(facts, false).notes, "not asked for"), "not wanted");
  check::that(has(choose({whole}, true).notes, "one rank"), "alone");
}

// --- ranks as threads

template <typename Body>
void ranks(int size, const Body& body) {
  const shm::UniqueId id = shm::UniqueId::random();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        auto group = shm::Communicator::join(id, rank, size, {"threads", milliseconds(20000)});
        body(*group);
        group->barrier(Deadline::after(milliseconds(20000)));
      } catch (const std::exception& error) {
        check::that(false, "rank ", rank, ": ", error.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
}

Deadline soon(int ms = 20000) { return Deadline::after(milliseconds(ms)); }

// Plain stores before a signal are seen after its wait: a missing order is a data race here.
void signals(int size) {
  ranks(size, [&](shm::Communicator& group) {
    Options options;
    options.channels = 2;
    auto memory = SymmetricMemory::create(group, 10000, options);
    const std::size_t offset = memory->allocate(64 * sizeof(long), 64, soon());
    const int me = group.rank(), right = (me + 1) % size, left = (me + size - 1) % size;
    long* mine = reinterpret_cast<long*>(memory->data(me) + offset);
    long* theirs = reinterpret_cast<long*>(memory->data(right) + offset);
    for (long turn = 0; turn < 100; ++turn) {
      for (int i = 0; i < 64; ++i) theirs[i] = 1000 * turn + me + i;
      memory->put_signal(right, 0);
      memory->wait_signal(left, 0, soon());
      for (int i = 0; i < 64; ++i) check::that(mine[i] == 1000 * turn + left + i, "turn ", turn);
      memory->put_signal(left, 1);
      memory->wait_signal(right, 1, soon());
    }
    memory->barrier(soon());
    memory->release(offset, soon());
    check::that(memory->used() == 0, "used");
    memory->close();
    memory->close();
    thrown<Closed>([&] { memory->put_signal(right, 0); });
  });
  check::that(registered() == 0, "registered after all have left: ", registered());
}

// A step that fails on one rank, or on two in different ways, throws one class on every rank.
void one_fails(int size) {
  ranks(size, [&](shm::Communicator& group) {
    const int me = group.rank();
    const std::string text = thrown<NoMemory>([&] {
      together(group, "step", soon(), [&] {
        if (me == 1) throw NoMemory("no room");
        if (me == 2) throw CudaError("something else");
      });
    });
    check::that(has(text, "no room"), text);
    check::that(me == 1 || has(text, "rank 1 failed"), text);
    check::that(me != 2 || has(text, "and here: something else"), text);
    together(group, "step", soon(), [] {});
    thrown<std::exception>([&] {
      together(group, "step", soon(), [&] {
        if (me == 0) throw std::runtime_error("not ours");
      });
    });
  });
}

void leaving() {
  ranks(2, [&](shm::Communicator& group) {
    auto memory = SymmetricMemory::create(group, 1, Options{});
    if (group.rank() == 0) {
      memory->put_signal(1, 3);
      memory.reset();  // the destructor leaves
      return;
    }
    memory->wait_signal(0, 3, soon());  // put before it left: still delivered
    check::that(has(thrown<PeerLost>([&] { memory->wait_signal(0, 3, soon()); }), "has closed"),
                "leaving");
  });
}

// Descriptors find their ranks, in order, and what strangers send is dropped.
void descriptors(int size) {
  ranks(size, [&](shm::Communicator& group) {
    const int me = group.rank();
    Peers peers(group, soon());
    FdExchange exchange(group, peers, "test", soon());
    for (int round = 0; round < 3; ++round) {
      int ends[2];
      check::that(::pipe(ends) == 0, "pipe");
      UniqueFd reading(ends[0]), writing(ends[1]);
      auto theirs = exchange.all_to_all(writing.get(), soon());
      for (int r = 0; r < size; ++r) {
        if (r == me) continue;
        const char word = static_cast<char>(me + 16 * round);
        check::that(::write(theirs[static_cast<std::size_t>(r)].get(), &word, 1) == 1, "write");
      }
      std::vector<int> seen;
      for (int r = 1; r < size; ++r) {
        char word = 0;
        check::that(::read(reading.get(), &word, 1) == 1, "read");
        seen.push_back(word - 16 * round);
      }
      std::sort(seen.begin(), seen.end());
      int expected = 0;
      for (int one : seen) {
        if (expected == me) ++expected;
        check::that(one == expected++, "round ", round, " rank ", me, ": ", one);
      }
    }
    const int root = size - 1;
    const UniqueFd got = exchange.broadcast(me == root ? 0 : -1, root, soon());
    check::that(static_cast<bool>(got) == (me != root), "broadcast");
    if (me == 0 && size > 1) {
      const std::string text = thrown<Timeout>([&] { (void)exchange.broadcast(-1, 1, soon(150)); });
      check::that(has(text, "rank 1 (pid") && has(text, "absent after 0.15 s"), text);
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  auto random = check::generator(argc, argv);
  layouts();
  allocators(random);
  registries();
  choices();
  for (int size : {1, 2, 3}) signals(size);
  one_fails(3);
  leaving();
  for (int size : {1, 2, 4}) descriptors(size);
  return check::finish("symmetric");
}
