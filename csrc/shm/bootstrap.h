// How the ranks of one host come to share memory: rank 0 makes an anonymous memory file and hands
// its descriptor to the others over a Unix socket in the abstract name space.
//
// Protocol "join" (the id holds a socket name and a 128-bit secret; nothing is left in any file
// system; a process of another user is turned away by the kernel's own word of who it is, on both
// sides)
//   rank 0    makes the memory file, reserves its part, listens; for each of ranks 1..size-1:
//   checks
//             the user and the fixed header (magic, secret, rank, size, bytes), sends the
//             descriptor
//   rank r    connects (again until the deadline), sends its header, maps the file it is sent,
//             answers "mapped" or why not
//   end       when all have mapped rank 0 sends each "go"; at the deadline, or when one has failed,
//   the
//             reason. A rank that hears neither gives up two seconds after its own deadline.
// So either all return, or all throw with the same reason.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "shm/communicator.h"

namespace pyparallel::shm {

// A shared mapping. The last owner in the process unmaps it; the kernel frees the memory with the
// last process. Threads that are ranks of one group share one mapping.
class Segment {
 public:
  // Collective over `size` ranks. Every rank asks for the same number of bytes, of which the first
  // `reserved` are reserved at once (NoMemory says needed and free); reserve() reserves others
  // before they are touched. Fresh memory is zero.
  // `hopeful` is called every now and then while ranks are awaited, and throws when they cannot
  // come any more; rank 0 passes that on to those who have come.
  static std::shared_ptr<Segment> open(
      const UniqueId& id, int rank, int size, std::size_t bytes, std::size_t reserved,
      const std::string& name, Deadline deadline, const std::function<void()>& hopeful = [] {});
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // Makes [offset, offset + bytes) safe to touch. Idempotent. Throws NoMemory.
  void reserve(std::size_t offset, std::size_t bytes);
  int fd() const { return file_.get(); }

  // Maps a memory file; open() is how ranks get one.
  Segment(UniqueFd file, std::size_t bytes, std::string name);

 private:
  UniqueFd file_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::string name_;
};

}  // namespace pyparallel::shm
