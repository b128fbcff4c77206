#include "symmetric/fd_exchange.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/error.h"
#include "symmetric/agreement.h"

namespace pyparallel::symmetric {
namespace {

constexpr std::uint64_t kMagic = 0x3144465f4c525050;  // "PPRL_FD1"

sockaddr_un address_of(const FdExchange::Secret& secret, int rank, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const int n =
      std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "pyparallel-fd-%016llx-%d",
                    static_cast<unsigned long long>(secret[0]), rank);
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  return address;
}

}  // namespace

struct FdExchange::Message {
  std::uint64_t magic;
  std::uint64_t secret[2];
  std::uint32_t round;
  std::int32_t rank;
};

FdExchange::FdExchange(shm::Communicator& group, const Peers& peers, std::string where,
                       Deadline deadline)
    : peers_(peers), where_(std::move(where)) {
  if (group.rank() == 0) {
    const shm::UniqueId random = shm::UniqueId::random();
    std::memcpy(secret_.data(), random.bytes.data() + 64, sizeof secret_);
  }
  group.broadcast(secret_.data(), sizeof secret_, DType::u8, 0, deadline);
  together(group, str(where_, ", binding a socket"), deadline, [&] {
    socket_ = UniqueFd(
        PYPARALLEL_SYSCALL(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)));
    const int on = 1;
    PYPARALLEL_SYSCALL(::setsockopt(socket_.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on));
    socklen_t length = 0;
    const sockaddr_un address = address_of(secret_, group.rank(), &length);
    PYPARALLEL_SYSCALL(::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length));
  });
}

bool FdExchange::send_to(int rank, int fd) {
  Message message{kMagic, {secret_[1], secret_[2]}, round_, peers_.rank()};
  socklen_t length = 0;
  sockaddr_un address = address_of(secret_, rank, &length);
  iovec part{&message, sizeof message};
  alignas(cmsghdr) char rights[CMSG_SPACE(sizeof fd)] = {};
  msghdr header{};
  header.msg_name = &address;
  header.msg_namelen = length;
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = rights;
  header.msg_controllen = sizeof rights;
  cmsghdr* first = CMSG_FIRSTHDR(&header);
  first->cmsg_level = SOL_SOCKET;
  first->cmsg_type = SCM_RIGHTS;
  first->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(first), &fd, sizeof fd);
  if (::sendmsg(socket_.get(), &header, MSG_NOSIGNAL) >= 0) return true;
  // A peer that has closed its socket (ECONNREFUSED) is seen by the wait that follows, or not
  // missed.
  if (errno == EAGAIN || errno == EINTR || errno == ECONNREFUSED) return false;
  throw SystemError(
      errno_text(str(where_, ": sendmsg of a descriptor to ", peers_.describe(rank)), errno));
}

void FdExchange::receive_one() {
  Message message{};
  iovec part{&message, sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(ucred))];
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  const ssize_t n = ::recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC);
  if (n < 0) {
    if (errno == EAGAIN || errno == EINTR) return;
    throw SystemError(errno_text(str(where_, ": recvmsg"), errno));
  }
  UniqueFd received;
  bool same_user = false;
  for (cmsghdr* one = CMSG_FIRSTHDR(&header); one != nullptr; one = CMSG_NXTHDR(&header, one)) {
    if (one->cmsg_level != SOL_SOCKET) continue;
    if (one->cmsg_type == SCM_RIGHTS) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(one), sizeof fd);
      received = UniqueFd(fd);
    } else if (one->cmsg_type == SCM_CREDENTIALS) {
      ucred sender;
      std::memcpy(&sender, CMSG_DATA(one), sizeof sender);
      same_user = sender.uid == ::geteuid();
    }
  }
  const bool ours = n == static_cast<ssize_t>(sizeof message) && message.magic == kMagic &&
                    message.secret[0] == secret_[1] && message.secret[1] == secret_[2] &&
                    message.rank >= 0 && message.rank < peers_.size() && message.round >= round_;
  if (ours && same_user && (header.msg_flags & MSG_CTRUNC) != 0)
    throw SystemError(str(where_, ": the descriptor of ", peers_.describe(message.rank),
                          " could not be taken: too many open files? (ulimit -n)"));
  if (ours && same_user && received) held_[{message.round, message.rank}] = std::move(received);
}

void FdExchange::exchange(const std::vector<int>& to, int fd, const std::vector<int>& from,
                          std::vector<UniqueFd>* out, Deadline deadline) {
  std::vector<int> unsent = to, awaited = from;
  const auto sent = [&](int rank) { return send_to(rank, fd); };
  const auto come = [&](int rank) {
    auto found = held_.find({round_, rank});
    if (found == held_.end()) return false;
    (*out)[static_cast<std::size_t>(rank)] = std::move(found->second);
    held_.erase(found);
    return true;
  };
  const auto settle = [](std::vector<int>& ranks, const auto& done) {
    ranks.erase(std::remove_if(ranks.begin(), ranks.end(), done), ranks.end());
  };
  for (;;) {
    settle(unsent, sent);
    settle(awaited, come);
    if (unsent.empty() && awaited.empty()) break;
    const int missing = awaited.empty() ? unsent.front() : awaited.front();
    const std::string what = str(where_, ", exchanging descriptors");
    if (deadline.expired())
      throw Timeout(str(what, ": ", peers_.describe(missing), " absent after ",
                        deadline.timeout_seconds(), " s"));
    // A full queue gives no event when it drains: with something unsent, look again soon.
    pollfd one{socket_.get(), POLLIN, 0};
    if (::poll(&one, 1, unsent.empty() ? 50 : 2) > 0) {
      receive_one();
    } else {
      peers_.require_alive(missing, what);
    }
  }
  ++round_;
}

std::vector<UniqueFd> FdExchange::all_to_all(int fd, Deadline deadline) {
  std::vector<int> others;
  for (int r = 0; r < peers_.size(); ++r)
    if (r != peers_.rank()) others.push_back(r);
  std::vector<UniqueFd> out(static_cast<std::size_t>(peers_.size()));
  exchange(others, fd, others, &out, deadline);
  return out;
}

UniqueFd FdExchange::broadcast(int fd, int root, Deadline deadline) {
  std::vector<int> others, sources{root};
  if (peers_.rank() == root) {
    sources.clear();
    for (int r = 0; r < peers_.size(); ++r)
      if (r != root) others.push_back(r);
  }
  std::vector<UniqueFd> out(static_cast<std::size_t>(peers_.size()));
  exchange(others, fd, sources, &out, deadline);
  return std::move(out[static_cast<std::size_t>(root)]);
}

}  // namespace pyparallel::symmetric
