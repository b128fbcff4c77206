#include "nccl/probe.h"

#include <elf.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstring>

#include "base/deadline.h"
#include "base/error.h"
#include "base/unique_fd.h"

extern char** environ;

namespace pyparallel::nccl {
namespace {

constexpr std::chrono::seconds probe_timeout{10};

bool read_at(int fd, void* out, std::size_t bytes, std::uint64_t offset) {
  return ::pread(fd, out, bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes);
}

// Output of the probed library is not ours to show.
struct Silence {
  posix_spawn_file_actions_t actions;
  Silence() {
    posix_spawn_file_actions_init(&actions);
    for (int fd : {0, 1, 2}) {
      posix_spawn_file_actions_addopen(&actions, fd, "/dev/null", fd == 0 ? O_RDONLY : O_WRONLY, 0);
    }
  }
  ~Silence() { posix_spawn_file_actions_destroy(&actions); }
};

}  // namespace

std::string truncation(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status{};
  Elf64_Ehdr header{};
  if (!file || ::fstat(file.get(), &status) != 0) return {};
  if (!read_at(file.get(), &header, sizeof header, 0)) return {};
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return {};
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_phentsize != sizeof(Elf64_Phdr)) return {};

  const auto bytes = static_cast<std::uint64_t>(status.st_size);
  std::uint64_t needed = header.e_phoff + std::uint64_t{header.e_phnum} * sizeof(Elf64_Phdr);
  for (unsigned i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment{};
    if (!read_at(file.get(), &segment, sizeof segment, header.e_phoff + i * sizeof segment)) break;
    if (segment.p_type == PT_LOAD) needed = std::max(needed, segment.p_offset + segment.p_filesz);
  }
  if (bytes >= needed) return {};
  return str("the file is truncated: it has ", bytes, " bytes, its headers promise at least ",
             needed, "; install it again");
}

std::string death_when_loading(const std::vector<std::string>& command, const std::string& path) {
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(const_cast<char*>(path.c_str()));
  arguments.push_back(nullptr);

  Silence silence;
  pid_t child = -1;
  const int failed =
      ::posix_spawnp(&child, arguments[0], &silence.actions, nullptr, arguments.data(), environ);
  if (failed != 0) throw SystemError(errno_text(str("starting the probe ", command[0]), failed));

  const Deadline deadline = Deadline::after(probe_timeout);
  int status = 0;
  for (long pause_ns = 1'000'000;; pause_ns = std::min(2 * pause_ns, 20'000'000L)) {
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended == child) break;
    if (ended == -1 && errno != EINTR) return {};  // the process ignores SIGCHLD: nobody can tell
    if (deadline.expired()) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return str("a process that loads it is not done after ", deadline.timeout_seconds(), " s");
    }
    const timespec pause{0, pause_ns};
    ::nanosleep(&pause, nullptr);
  }
  if (!WIFSIGNALED(status)) return {};
  return str("a process that loads it is killed by signal ", WTERMSIG(status), " (",
             strsignal(WTERMSIG(status)), "): the file is damaged or not for this machine");
}

}  // namespace pyparallel::nccl
