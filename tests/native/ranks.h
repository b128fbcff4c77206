// Threads as the ranks of one communicator, and data that every rank can make for any other.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "scalar_reference.h"
#include "shm/communicator.h"

namespace ranks {

using pyparallel::Deadline;
using pyparallel::DType;
using pyparallel::ReduceOp;
using pyparallel::size_of;
using pyparallel::str;
using pyparallel::shm::Block;
using pyparallel::shm::Communicator;
using pyparallel::shm::ConstBlock;
using pyparallel::shm::Options;
using pyparallel::shm::Reduction;
using pyparallel::shm::UniqueId;
using pyparallel::shm::Work;

constexpr std::chrono::milliseconds kTimeout(60000);

inline Deadline soon() { return Deadline::after(kTimeout); }

// Random numbers that depend on the arguments only: the same in every thread.
class Numbers {
 public:
  explicit Numbers(std::uint64_t seed, std::uint64_t a = 0, std::uint64_t b = 0)
      : state_(seed ^ (a + 1) * 0x9e3779b97f4a7c15 ^ (b + 1) * 0xc2b2ae3d27d4eb4f) {
    next();
  }
  std::uint64_t next() {  // splitmix64
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t n) { return next() % n; }
  bool one_in(std::size_t n) { return below(n) == 0; }

 private:
  std::uint64_t state_;
};

// `count` elements of moderate numbers: sums of a few neither overflow nor vanish.
inline std::vector<std::byte> data(Numbers numbers, DType dtype, std::size_t count) {
  std::vector<std::byte> bytes(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t x = numbers.next();
    const double real = static_cast<double>(x >> 11) / 9007199254740992.0 * 4 - 2;
    const auto narrow = static_cast<float>(real);
    // A sign, an exponent near that of 1, any fraction.
    const auto half = static_cast<std::uint16_t>((x & 0x8fff) | 0x3000);
    const auto bfloat = static_cast<std::uint16_t>((x & 0x80ff) | 0x3f00);
    const std::uint8_t flag = x & 1;
    const void* from = dtype == DType::f64       ? static_cast<const void*>(&real)
                       : dtype == DType::f32     ? static_cast<const void*>(&narrow)
                       : dtype == DType::f16     ? static_cast<const void*>(&half)
                       : dtype == DType::bf16    ? static_cast<const void*>(&bfloat)
                       : dtype == DType::boolean ? static_cast<const void*>(&flag)
                                                 : static_cast<const void*>(&x);
    std::memcpy(bytes.data() + i * size_of(dtype), from, size_of(dtype));
  }
  return bytes;
}

// Where a rank now and then loses time: nothing, a yield, a sleep.
inline void stray(Numbers& mine) {
  const std::size_t kind = mine.below(12);
  if (kind == 0) std::this_thread::sleep_for(std::chrono::microseconds(mine.below(2000)));
  if (kind < 3) std::this_thread::yield();
}

// Runs `body(rank)` on `n` threads. What one throws is a failed check of `what`.
template <typename Body>
void on_threads(const char* what, int n, const Body& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (const std::exception& error) {
        check::that(false, what, ", rank ", r, " of ", n, ": ", error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The same with a communicator for each, closed at the end.
template <typename Body>
void run(const char* what, int n, const Body& body, std::chrono::milliseconds timeout = kTimeout) {
  const UniqueId id = UniqueId::random();
  Options options;
  options.name = what;
  options.timeout = timeout;
  on_threads(what, n, [&](int rank) { body(Communicator::join(id, rank, n, options)); });
}

// The status that `call` throws, ok if none; the message in `text`.
template <typename Call>
pyparallel::Status status_of(const Call& call, std::string* text = nullptr) {
  try {
    call();
    return pyparallel::Status::ok;
  } catch (const pyparallel::Error& error) {
    if (text) *text = error.what();
    return error.status();
  }
}

}  // namespace ranks
