#include "base/host_identity.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "base/env.h"
#include "base/error.h"
#include "base/unique_fd.h"

namespace pyparallel {
namespace {

constexpr std::size_t longest = 128;

std::string boot_id() {
  const UniqueFd file(
      PYPARALLEL_SYSCALL(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC)));
  std::array<char, 64> text{};
  const auto bytes = PYPARALLEL_SYSCALL(::read(file.get(), text.data(), text.size()));
  const auto end = std::find_if(text.begin(), text.begin() + bytes,
                                [](unsigned char c) { return std::isspace(c) != 0; });
  return std::string(text.begin(), end);
}

}  // namespace

std::string host_identity() {
  const std::string given = env::host_id();
  if (!given.empty()) {
    const bool printable = std::all_of(given.begin(), given.end(),
                                       [](unsigned char c) { return std::isgraph(c) != 0; });
    PYPARALLEL_REQUIRE(printable && given.size() <= longest, "PYPARALLEL_HOST_ID has ",
                       given.size(), " characters; expected 1 to ", longest,
                       " printable ones without spaces");
    return given;
  }
  struct stat net{};
  PYPARALLEL_SYSCALL(::stat("/proc/self/ns/net", &net));
  return str("boot-", boot_id(), "-net-", net.st_ino);
}

}  // namespace pyparallel
