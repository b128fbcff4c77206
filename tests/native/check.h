// The little that the native tests need of a test framework: failures are counted, the first few
// are printed with their values, finish() gives the exit status.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>
#include <string>

namespace check {

// Counted without order, so that counting hides no race between the threads that are tested.
inline std::atomic<long> passed{0}, failed{0};

template <typename... Pieces>
bool that(bool condition, const Pieces&... pieces) {
  if (condition) {
    passed.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  if (failed.fetch_add(1, std::memory_order_relaxed) < 20) {
    std::ostringstream text;
    (text << ... << pieces);
    std::fprintf(stderr, "FAILED: %s\n", text.str().c_str());
  }
  return false;
}

// A test that checked nothing has failed too.
inline int finish(const char* name) {
  std::printf("%s: %ld checks, %ld failed\n", name, passed.load(), failed.load());
  return failed == 0 && passed > 0 ? 0 : 1;
}

// The argument is the seed, so that a failure can be repeated; 0 takes one from the system.
inline std::mt19937_64 generator(int argc, char** argv) {
  unsigned long seed = argc > 1 ? std::strtoul(argv[1], nullptr, 0) : 0;
  if (seed == 0) seed = std::random_device{}();
  std::printf("seed %lu\n", seed);
  return std::mt19937_64(seed);
}

}  // namespace check
