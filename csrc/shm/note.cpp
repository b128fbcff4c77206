#include "shm/note.h"

namespace pyparallel::shm {
namespace {

thread_local const void* note_owner = nullptr;
thread_local Note note;

}  // namespace

void leave_note(const void* owner, std::string_view text) {
  std::uint64_t digest = 14695981039346656037u;  // FNV-1a
  for (const char c : text) digest = (digest ^ static_cast<unsigned char>(c)) * 1099511628211u;
  note.digest = digest | 1;
  note.length = text.copy(note.text, Note::capacity - 1);
  note.text[note.length] = '\0';
  note_owner = owner;
}

const Note* take_note(const void* owner) noexcept {
  if (note_owner != owner || owner == nullptr) return nullptr;
  note_owner = nullptr;
  return &note;
}

}  // namespace pyparallel::shm
