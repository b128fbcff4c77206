// How the ranks of a group act as one while they set something up: each tells all others how its
// part went, so that a failure on one rank is raised on every rank and nobody waits for it.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <type_traits>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "shm/communicator.h"

namespace pyparallel::symmetric {

// Collective. Every rank's `mine`, by rank.
template <typename T>
std::vector<T> gather_all(shm::Communicator& group, const T& mine, Deadline deadline) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(static_cast<std::size_t>(group.size()));
  std::vector<shm::Block> blocks;
  for (T& one : all) blocks.push_back({&one, sizeof(T)});
  group.all_gather(&mine, blocks.data(), DType::u8, deadline);
  return all;
}

// How one rank's part of a step went. Fixed size: it travels.
struct Outcome {
  std::int32_t status = 0;  // Status
  char text[508] = {};

  static Outcome of(const std::exception_ptr& failure);
};

// Collective. Returns where every rank's `failure` is null; else throws on every rank the class and
// the words of the lowest failing rank.
void agree(shm::Communicator& group, const std::string& what, const std::exception_ptr& failure,
           Deadline deadline);

// Collective. Runs `step` here and agrees on how it went.
template <typename Step>
void together(shm::Communicator& group, const std::string& what, Deadline deadline, Step&& step) {
  std::exception_ptr failure;
  try {
    step();
  } catch (...) {
    failure = std::current_exception();
  }
  agree(group, what, failure, deadline);
}

// "1000 1000 1024"
template <typename T>
std::string values_by_rank(const std::vector<T>& values) {
  std::string text;
  for (const T& value : values) text += str(text.empty() ? "" : " ", value);
  return text;
}

}  // namespace pyparallel::symmetric
