// What a caller says of its thread's next collective on one communicator: which call of a higher
// level it belongs to, with that call's sizes and flags. Ranks whose notes differ all raise, and
// the text is what the error shows. It costs no message: the digest travels in the call's header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pyparallel::shm {

struct Note {
  static constexpr std::size_t capacity = 256;  // longer texts are cut; the digest is of the whole

  std::uint64_t digest = 0;  // 0: there is no note
  std::size_t length = 0;
  char text[capacity] = {};

  std::string_view view() const { return {text, length}; }
};

// The note that this thread's next collective on `owner` carries; replaces an earlier one.
void leave_note(const void* owner, std::string_view text);
// Takes it, once. nullptr: none was left, or it is for another communicator. Valid until the thread
// leaves another.
const Note* take_note(const void* owner) noexcept;

}  // namespace pyparallel::shm
