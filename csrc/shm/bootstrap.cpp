#include "shm/bootstrap.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "base/interrupt.h"
#include "shm/layout.h"
#include "shm/segment_file.h"

namespace pyparallel::shm {
namespace {

using std::chrono::milliseconds;

constexpr std::uint64_t kMagic = 0x3144495f4c525050;  // "PPRL_ID1", also the version of the layout
struct IdFields {
  std::uint64_t magic;
  std::uint64_t socket;     // public: any user can list socket names
  std::uint64_t secret[2];  // proves that a process was given the id
};
static_assert(sizeof(IdFields) <= UniqueId::size);

IdFields fields_of(const UniqueId& id) {
  IdFields fields;
  std::memcpy(&fields, id.bytes.data(), sizeof fields);
  PYPARALLEL_REQUIRE(
      fields.magic == kMagic,
      "join: these 128 bytes are no id made by UniqueId::random (or by another version)");
  return fields;
}

// The wire format, both ways. Fixed size, checked before use.
struct Hello {
  std::uint64_t magic;
  std::uint64_t secret[2];
  std::int32_t rank;
  std::int32_t size;
  std::uint64_t bytes;
};
struct Answer {
  std::uint64_t magic;
  std::int32_t status;  // of the sender, Status::ok when all is well
  char text[500];
};

Answer answer_of(Status status, const std::string& text) {
  Answer answer{kMagic, static_cast<std::int32_t>(status), {}};
  text.copy(answer.text, sizeof answer.text - 1);
  return answer;
}

sockaddr_un address_of(const IdFields& id, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // A leading zero byte: the abstract name space, which lives and dies with its sockets.
  const int n = std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1,
                              "pyparallel-%016llx", static_cast<unsigned long long>(id.socket));
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  return address;
}

UniqueFd new_socket() {
  return UniqueFd(PYPARALLEL_SYSCALL(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)));
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  PYPARALLEL_SYSCALL(getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length));
  return peer.uid == geteuid();
}

// True when readable (or at end of file) before `until`.
bool readable(int socket, const Deadline& until) {
  for (;;) {
    const auto left = std::chrono::duration_cast<milliseconds>(until.remaining()).count();
    pollfd one{socket, POLLIN, 0};
    const int n = ::poll(&one, 1, static_cast<int>(std::min<long>(left + 1, 100)));
    if (n > 0) return true;
    if (interrupt_requested()) throw Interrupted("join: interrupted");
    if (n == 0 && until.expired()) return false;
    if (n < 0 && errno != EINTR) throw SystemError(errno_text("poll", errno));
  }
}

// One message of exactly T. Empty when the peer is gone, late, or sent something else.
template <typename T>
std::optional<T> receive(int socket, const Deadline& until, UniqueFd* descriptor = nullptr) {
  if (!readable(socket, until)) return std::nullopt;
  T message;
  iovec part{&message, sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  const ssize_t n = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  UniqueFd received;
  const cmsghdr* first = CMSG_FIRSTHDR(&header);
  if (n >= 0 && first != nullptr && first->cmsg_type == SCM_RIGHTS) {
    int fd;
    std::memcpy(&fd, CMSG_DATA(first), sizeof fd);
    received = UniqueFd(fd);
  }
  if (n != static_cast<ssize_t>(sizeof message) || message.magic != kMagic) return std::nullopt;
  if (descriptor != nullptr) *descriptor = std::move(received);
  return message;
}

template <typename T>
bool transmit(int socket, const T& message, int descriptor = -1) {
  T copy = message;
  iovec part{&copy, sizeof copy};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (descriptor >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* first = CMSG_FIRSTHDR(&header);
    first->cmsg_level = SOL_SOCKET;
    first->cmsg_type = SCM_RIGHTS;
    first->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(first), &descriptor, sizeof descriptor);
  }
  return ::sendmsg(socket, &header, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof copy);
}

// Threads that are ranks of one group share one mapping, so that a tool that watches addresses
// (ThreadSanitizer) sees what they share, and the memory is mapped once. The file's own number is
// part of the key: a later group of the same id has another file and must not get this mapping.
std::shared_ptr<Segment> map_once(const IdFields& id, UniqueFd file, std::size_t bytes,
                                  const std::string& name) {
  static std::mutex mutex;
  static std::map<std::array<std::uint64_t, 5>, std::weak_ptr<Segment>> mapped;
  struct stat facts{};
  PYPARALLEL_SYSCALL(fstat(file.get(), &facts));
  const std::array<std::uint64_t, 5> key{id.secret[0], id.secret[1], fork_generation(),
                                         static_cast<std::uint64_t>(facts.st_dev),
                                         static_cast<std::uint64_t>(facts.st_ino)};
  std::lock_guard lock(mutex);
  for (auto it = mapped.begin(); it != mapped.end();)
    it = it->second.expired() ? mapped.erase(it) : std::next(it);
  auto segment = mapped[key].lock();
  if (segment == nullptr) {
    segment = std::make_shared<Segment>(std::move(file), bytes, name);
    mapped[key] = segment;
  }
  return segment;
}

// "0-3" or "0 2 5-7".
std::string rank_list(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
    text += str(text.empty() ? "" : " ", ranks[i]);
    if (j > i) text += str("-", ranks[j]);
    i = j + 1;
  }
  return text;
}

struct Guest {
  UniqueFd socket;
  bool mapped = false;
  bool failed = false;  // has said why, and says nothing more
};

std::shared_ptr<Segment> open_as_host(const IdFields& id, int size, std::size_t bytes,
                                      std::size_t reserved, const std::string& name,
                                      const Deadline& deadline,
                                      const std::function<void()>& hopeful) {
  if (size == 1) {
    UniqueFd file = make_memory_file(bytes);
    reserve_in_file(file.get(), 0, reserved, name);
    return map_once(id, std::move(file), bytes, name);
  }
  std::vector<Guest> guests(size);  // by rank; [0] is this rank and stays empty
  int missing = size - 1;
  // Tells everybody who has come, then throws the same.
  const auto fail = [&](Status status, const std::string& text) {
    for (const Guest& guest : guests)
      if (guest.socket) transmit(guest.socket.get(), answer_of(status, text));
    throw_status(status, text);
  };
  const auto ask_hope = [&] {
    try {
      hopeful();
    } catch (const Error& error) {
      fail(error.status(), str("join of group ", name, ": ", error.what()));
    }
  };

  UniqueFd listener = new_socket();
  socklen_t length = 0;
  const sockaddr_un address = address_of(id, &length);
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) == -1) {
    if (errno == EADDRINUSE)
      throw InvalidArgument(str("join of group ", name,
                                ": another rank 0 is using this id; an id serves one group once"));
    throw SystemError(errno_text("bind", errno));
  }
  PYPARALLEL_SYSCALL(listen(listener.get(), 4096));

  // Made after listening: when memory lacks, those who come hear why.
  UniqueFd file;
  std::string trouble;
  Status trouble_status = Status::ok;
  try {
    file = make_memory_file(bytes);
    reserve_in_file(file.get(), 0, reserved, name);
  } catch (const Error& error) {
    trouble = error.what();
    trouble_status = error.status();
  }

  while (missing > 0) {
    std::vector<pollfd> watched{{listener.get(), POLLIN, 0}};
    std::vector<int> ranks{0};
    std::vector<int> absent;
    int come = 0;
    for (int r = 1; r < size; ++r) {
      if (!guests[r].mapped) absent.push_back(r);
      if (!guests[r].socket) continue;
      ++come;
      if (guests[r].failed) continue;
      watched.push_back({guests[r].socket.get(), POLLIN, 0});
      ranks.push_back(r);
    }
    if (trouble_status != Status::ok && come == size - 1) fail(trouble_status, trouble);
    if (deadline.expired()) {
      if (trouble_status != Status::ok) fail(trouble_status, trouble);
      fail(Status::timeout, str("join of ", group_text(name, size), ": absent after ",
                                deadline.timeout_seconds(), " s: rank ", rank_list(absent),
                                ". Were all started, with the same id and world size?"));
    }
    const auto left = std::chrono::duration_cast<milliseconds>(deadline.remaining()).count();
    const int n =
        ::poll(watched.data(), watched.size(), static_cast<int>(std::min<long>(left + 1, 100)));
    if (interrupt_requested())
      fail(Status::interrupted, str("join of group ", name, ": rank 0 was interrupted"));
    if (n <= 0) {
      ask_hope();
      continue;
    }

    for (std::size_t i = 1; i < watched.size(); ++i) {
      if (watched[i].revents == 0) continue;
      Guest& guest = guests[ranks[i]];
      const auto answer = receive<Answer>(guest.socket.get(), Deadline::after(milliseconds(0)));
      if (!answer) {
        guest.socket.reset();
        ask_hope();  // it may have given up because another died, whom this names
        fail(Status::peer_lost,
             str("join of group ", name, ": rank ", ranks[i], " died or gave up while joining"));
      }
      if (answer->status != 0) {
        // Told to all when all have come: who comes later would wait for rank 0 in vain.
        guest.failed = true;
        if (trouble_status != Status::ok) continue;
        trouble_status = static_cast<Status>(answer->status);
        trouble = str("join of group ", name, ": rank ", ranks[i], " failed: ", answer->text);
        continue;
      }
      if (!guest.mapped) --missing;
      guest.mapped = true;
    }

    if (watched[0].revents == 0) continue;
    UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket || !same_user(socket.get())) continue;
    const auto hello = receive<Hello>(socket.get(), Deadline::after(milliseconds(1000)));
    if (!hello || hello->secret[0] != id.secret[0] || hello->secret[1] != id.secret[1]) continue;
    std::string misfit;
    if (hello->size != size)
      misfit = str("rank ", hello->rank, " has world size ", hello->size, ", rank 0 has ", size);
    else if (hello->rank < 1 || hello->rank >= size)
      misfit = str("rank ", hello->rank, " is outside 0..", size - 1, ", or rank 0 came twice");
    else if (guests[hello->rank].socket)
      misfit = str("rank ", hello->rank, " came twice");
    else if (hello->bytes != bytes)
      misfit = str("rank ", hello->rank, " asks for ", hello->bytes, " bytes, rank 0 for ", bytes,
                   " (different sizes or builds)");
    if (!misfit.empty()) {
      const std::string text = str("join of group ", name, ": ", misfit);
      transmit(socket.get(), answer_of(Status::invalid_argument, text));
      fail(Status::invalid_argument, text);
    }
    if (trouble_status == Status::ok) transmit(socket.get(), answer_of(Status::ok, ""), file.get());
    guests[hello->rank].socket = std::move(socket);
  }
  if (trouble_status != Status::ok) throw_status(trouble_status, trouble);

  auto segment = map_once(id, std::move(file), bytes, name);
  for (int r = 1; r < size; ++r) transmit(guests[r].socket.get(), answer_of(Status::ok, ""));
  return segment;
}

std::shared_ptr<Segment> open_as_guest(const IdFields& id, int rank, int size, std::size_t bytes,
                                       const std::string& name, const Deadline& deadline,
                                       const std::function<void()>& hopeful) {
  socklen_t length = 0;
  const sockaddr_un address = address_of(id, &length);
  UniqueFd socket;
  for (auto pause = std::chrono::microseconds(100);;
       pause = std::min(pause * 2, std::chrono::microseconds(10000))) {
    socket = new_socket();
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) break;
    if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR)
      throw SystemError(errno_text(str("join of group ", name, ": connect"), errno));
    if (deadline.expired())
      throw Timeout(str("join of ", group_text(name, size), ": rank 0 absent after ",
                        deadline.timeout_seconds(), " s (asked by rank ", rank,
                        "). Was it started, on this host, with the same id?"));
    if (interrupt_requested()) throw Interrupted("join: interrupted");
    hopeful();
    std::this_thread::sleep_for(pause);
  }
  if (!same_user(socket.get()))
    throw InvalidArgument(str("join of group ", name, ": the id's socket belongs to another user"));

  const Deadline last_word = Deadline::after(
      std::chrono::duration_cast<milliseconds>(deadline.remaining()) + milliseconds(2000));
  // Rank 0's refusal, or its silence, as an exception.
  const auto hear = [&](UniqueFd* descriptor) {
    const auto answer = receive<Answer>(socket.get(), last_word, descriptor);
    if (!answer) {
      const std::string what = str("join of ", group_text(name, size), ": rank 0 ");
      if (last_word.expired())
        throw Timeout(what + str("is silent after ", deadline.timeout_seconds(), " s"));
      throw PeerLost(what + "died or gave up while joining");
    }
    if (answer->status != 0) throw_status(static_cast<Status>(answer->status), answer->text);
  };

  transmit(socket.get(), Hello{kMagic, {id.secret[0], id.secret[1]}, rank, size, bytes});
  UniqueFd file;
  hear(&file);
  if (!file) throw SystemError(str("join of group ", name, ": rank 0 sent no memory file"));
  std::shared_ptr<Segment> segment;
  try {
    segment = map_once(id, std::move(file), bytes, name);
  } catch (const Error& error) {
    transmit(socket.get(), answer_of(error.status(), error.what()));
    throw;
  }
  transmit(socket.get(), answer_of(Status::ok, ""));
  hear(nullptr);
  return segment;
}

}  // namespace

UniqueId UniqueId::random() {
  UniqueId id;
  std::size_t filled = 0;
  while (filled < size) {
    const ssize_t n = ::getrandom(id.bytes.data() + filled, size - filled, 0);
    if (n > 0) filled += static_cast<std::size_t>(n);
    if (n < 0 && errno != EINTR) throw SystemError(errno_text("getrandom", errno));
  }
  std::memcpy(id.bytes.data(), &kMagic, sizeof kMagic);
  return id;
}

std::shared_ptr<Segment> Segment::open(const UniqueId& id, int rank, int size, std::size_t bytes,
                                       std::size_t reserved, const std::string& name,
                                       Deadline deadline, const std::function<void()>& hopeful) {
  const IdFields fields = fields_of(id);
  PYPARALLEL_REQUIRE(size >= 1, "join of group ", name, ": world size ", size,
                     ", expected at least 1");
  PYPARALLEL_REQUIRE(rank >= 0 && rank < size, "join of group ", name, ": rank ", rank,
                     ", expected 0 to ", size - 1, " (world size ", size, ")");
  PYPARALLEL_REQUIRE(bytes >= 1 && reserved <= bytes, "join of group ", name, ": ", bytes,
                     " bytes");
  return rank == 0 ? open_as_host(fields, size, bytes, reserved, name, deadline, hopeful)
                   : open_as_guest(fields, rank, size, bytes, name, deadline, hopeful);
}

}  // namespace pyparallel::shm
