// What ranks of several hosts tell each other before a collective; a fixed binary layout.
#pragma once

#include <algorithm>
#include <cstring>
#include <string_view>

#include "torch/hierarchical.h"

namespace pyparallel::dist {

struct HierarchicalCommunicator::Record {
  static constexpr std::uint32_t expected_magic = 0x31525050;  // "PPR1"
  enum class State : std::uint8_t {
    ready,      // this rank (or all ranks of this host) can start; the text is its note
    refused,    // this rank's arguments are wrong: the text says why
    ruled_out,  // the call cannot be: every rank raises the text; the group goes on
    failed,     // something broke: the text says what; the group ends
  };

  std::uint32_t magic = expected_magic;
  Op op = Op::barrier;
  DType dtype = DType::u8;
  ReduceOp reduction = ReduceOp::sum;
  State state = State::ready;
  std::int32_t root = -1;
  std::int32_t rank = 0;
  std::uint64_t sequence = 0;
  std::uint64_t count = 0;
  std::uint64_t digest = 0;
  char text[472] = {};

  void set(State new_state, std::string_view why) {
    state = new_state;
    const std::size_t length = std::min(why.size(), sizeof text - 1);
    std::memcpy(text, why.data(), length);
    text[length] = 0;
  }
  // Of a record from elsewhere: nothing in it is trusted.
  bool valid() const {
    return magic == expected_magic && op <= Op::refused && dtype < DType::count_ &&
           reduction < ReduceOp::count_ && state <= State::failed && text[sizeof text - 1] == 0;
  }
  bool matches(const Record& other) const {
    return op == other.op && dtype == other.dtype && reduction == other.reduction &&
           root == other.root && sequence == other.sequence && count == other.count &&
           digest == other.digest;
  }
};
}  // namespace pyparallel::dist
