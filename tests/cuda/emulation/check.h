// Cases by name, and checks that say where they failed.
#pragma once

#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>

namespace pyparallel::cuda::emulation {

using Cases = std::map<std::string, std::function<void()>>;
void add_data_cases(Cases& cases);
void add_protocol_cases(Cases& cases);
void add_fault_cases(Cases& cases);
void add_choice_cases(Cases& cases);

template <typename... Pieces>
[[noreturn]] void fail_case(const char* file, int line, const Pieces&... pieces) {
  std::ostringstream out;
  out << file << ":" << line << ": ";
  (out << ... << pieces);
  throw std::runtime_error(out.str());
}

}  // namespace pyparallel::cuda::emulation

#define CHECK(condition, ...)                                                      \
  do {                                                                             \
    if (!(condition)) {                                                            \
      ::pyparallel::cuda::emulation::fail_case(__FILE__, __LINE__, #condition,     \
                                               " does not hold. ", ##__VA_ARGS__); \
    }                                                                              \
  } while (0)
