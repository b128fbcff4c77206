#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <utility>

#include "base/env.h"
#include "base/error.h"
#include "shm/segment_file.h"

namespace pyparallel::shm {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

std::size_t number_in_file(const char* path) {
  std::ifstream in(path);
  std::size_t value = 0;
  return in >> value ? value : kUnlimited;  // cgroup's "max" is no number: unlimited
}

std::size_t available_memory() {
  std::ifstream in("/proc/meminfo");
  std::string word;
  while (in >> word) {
    std::size_t kib = 0;
    if (word == "MemAvailable:" && in >> kib) return kib * 1024;
  }
  return kUnlimited;
}

// What this process may still take: of the machine, and of its control group where there is one.
std::size_t free_memory() {
  const std::size_t limit = number_in_file("/sys/fs/cgroup/memory.max");
  const std::size_t used = number_in_file("/sys/fs/cgroup/memory.current");
  std::size_t free = available_memory();
  if (limit != kUnlimited && used != kUnlimited)
    free = std::min(free, limit > used ? limit - used : 0);
  return free;
}

[[noreturn]] void throw_no_memory(const std::string& name, std::size_t needed, std::size_t free,
                                  const std::string& where, const std::string& mend) {
  throw NoMemory(str("group ", name, ": not enough shared memory: ", needed, " bytes needed, ",
                     free, " bytes free in ", where, ". ", mend));
}

}  // namespace

UniqueFd make_memory_file(std::size_t bytes) {
  const std::string dir = env::shm_dir();
  UniqueFd file;
  if (dir.empty()) {
    file =
        UniqueFd(PYPARALLEL_SYSCALL(memfd_create("pyparallel", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  } else {
    file = UniqueFd(::open(dir.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600));
    if (!file && (errno == EOPNOTSUPP || errno == EISDIR)) {
      // A file system without O_TMPFILE: the name exists for a moment only.
      std::string path = dir + "/pyparallel-XXXXXX";
      file = UniqueFd(PYPARALLEL_SYSCALL(mkostemp(path.data(), O_CLOEXEC)));
      ::unlink(path.c_str());
    }
    if (!file) throw InvalidArgument(errno_text("PYPARALLEL_SHM_DIR=" + dir, errno));
  }
  PYPARALLEL_SYSCALL(ftruncate(file.get(), static_cast<off_t>(bytes)));
  // No process may shrink the file under the others (that would be a bus error in them). Refused
  // where the file system has no seals: then the file is reachable only through its descriptor.
  if (dir.empty())
    PYPARALLEL_SYSCALL(fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
  return file;
}

void reserve_in_file(int fd, std::size_t offset, std::size_t bytes, const std::string& name) {
  if (bytes == 0) return;
  const std::string dir = env::shm_dir();
  if (dir.empty()) {
    // memfd has no size limit of its own: asking the kernel for more than there is would wake the
    // out-of-memory killer instead of failing.
    const std::size_t free = free_memory();
    if (bytes > free)
      throw_no_memory(name, bytes, free, "memory",
                      "Use a smaller buffer or raise the memory limit.");
  }
  int result;
  do {
    result = fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (result == -1 && errno == EINTR);
  if (result == 0) return;
  if (errno == ENOSPC || errno == ENOMEM || errno == EDQUOT) {
    if (dir.empty())
      throw_no_memory(name, bytes, free_memory(), "memory",
                      "Use a smaller buffer or raise the memory limit.");
    struct statfs fs{};
    const std::size_t free =
        ::fstatfs(fd, &fs) == 0 ? static_cast<std::size_t>(fs.f_bavail) * fs.f_bsize : 0;
    throw_no_memory(name, bytes, free, "PYPARALLEL_SHM_DIR=" + dir,
                    "Enlarge that file system, or unset the variable to use anonymous memory.");
  }
  throw SystemError(errno_text("fallocate", errno));
}

Segment::Segment(UniqueFd file, std::size_t bytes, std::string name)
    : file_(std::move(file)), bytes_(bytes), name_(std::move(name)) {
  void* at = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  if (at == MAP_FAILED) throw SystemError(errno_text(str("mmap of ", bytes_, " bytes"), errno));
  data_ = static_cast<std::byte*>(at);
}

Segment::~Segment() { ::munmap(data_, bytes_); }

void Segment::reserve(std::size_t offset, std::size_t bytes) {
  reserve_in_file(file_.get(), offset, bytes, name_);
}

}  // namespace pyparallel::shm
