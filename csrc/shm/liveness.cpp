#include "shm/liveness.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

namespace pyparallel::shm {
namespace {

struct ProcStat {
  char state = '?';  // R, S, D, T (stopped), Z (zombie), ...
  std::uint64_t start_time = 0;
};

// False when there is no such process.
bool read_stat(int pid, ProcStat* out) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return false;
  // The command name (field 2) may hold anything: fields are counted from its closing parenthesis.
  const std::size_t end = text.rfind(')');
  if (end == std::string::npos) return false;
  std::istringstream fields(text.substr(end + 1));
  fields >> out->state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  return static_cast<bool>(fields >> out->start_time);
}

std::uint64_t this_pid_namespace() {
  struct stat info{};
  return ::stat("/proc/self/ns/pid", &info) == 0 ? static_cast<std::uint64_t>(info.st_ino) : 0;
}

}  // namespace

ProcessIdentity ProcessIdentity::of_this_process() {
  ProcessIdentity identity;
  identity.pid = ::getpid();
  ProcStat stat;
  if (read_stat(identity.pid, &stat)) identity.start_time = stat.start_time;
  identity.pid_namespace = this_pid_namespace();
  return identity;
}

int ProcessWatch::visible_pid() const {
  return identity_.pid_namespace == this_pid_namespace() ? identity_.pid : 0;
}

bool ProcessWatch::alive() {
  if (identity_.pid == ::getpid()) return true;
  if (visible_pid() == 0) return true;  // cannot tell
  std::lock_guard lock(mutex_);
  if (!opened_) {
#ifdef SYS_pidfd_open
    pidfd_ = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, identity_.pid, 0)));
#endif
    opened_ = true;
    // The descriptor is of whoever has the pid now: make sure that this is the same process.
    ProcStat stat;
    if (!read_stat(identity_.pid, &stat) || stat.start_time != identity_.start_time) {
      pidfd_.reset();  // another's: the next question must not be answered by it
      return false;
    }
  }
  if (pidfd_) {
    pollfd one{pidfd_.get(), POLLIN, 0};
    return ::poll(&one, 1, 0) != 1;
  }
  ProcStat stat;
  return read_stat(identity_.pid, &stat) && stat.start_time == identity_.start_time &&
         stat.state != 'Z';
}

std::string ProcessWatch::state() {
  if (visible_pid() == 0) return "in another pid namespace";
  if (!alive()) return "dead";
  ProcStat stat;
  if (!read_stat(identity_.pid, &stat)) return "dead";
  return stat.state == 'T' || stat.state == 't' ? "stopped" : "alive";
}

}  // namespace pyparallel::shm
