#include "symmetric/symmetric_memory.h"

#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "base/host_identity.h"
#include "symmetric/agreement.h"
#include "symmetric/device_backing.h"
#include "symmetric/host_backing.h"

namespace pyparallel::symmetric {
namespace {

// What each rank asks for; rank 0's id, segment and generation are everybody's.
struct Proposal {
  std::uint64_t bytes;
  std::int32_t channels;
  std::int32_t cuda;
  std::int32_t multicast;
  std::int32_t reserved;
  std::uint64_t generation;
  std::uint64_t segment;
  shm::UniqueId id;
  char host[256];
};

template <typename Member>
void require_alike(const std::vector<Proposal>& all, Member member, const char* what,
                   const std::string& where) {
  bool alike = true;
  std::vector<std::uint64_t> values;
  for (const Proposal& one : all) {
    values.push_back(static_cast<std::uint64_t>(one.*member));
    alike = alike && values.back() == values.front();
  }
  if (!alike)
    throw Mismatch(str(where, ": ", what, " differs: ", values_by_rank(values),
                       " (by rank); every rank must ask for the same"));
}

// Memory is shared within a host; a communicator may span several.
void require_one_host(const std::vector<Proposal>& all, const std::string& where) {
  for (std::size_t r = 1; r < all.size(); ++r)
    if (std::strncmp(all[r].host, all[0].host, sizeof all[r].host) != 0)
      throw Unsupported(str(where, ": rank 0 is on ", all[0].host, ", rank ", r, " on ",
                            all[r].host,
                            "; ranks of one host can share memory. Split the group by host"));
}

Proposal propose(std::size_t bytes, const Options& options, const std::string& host) {
  static std::atomic<std::uint64_t> generations{0};
  Proposal mine{};
  mine.bytes = bytes;
  mine.channels = options.channels;
  mine.cuda = options.device >= 0;
  mine.multicast = options.multicast;
  mine.generation = ++generations;
  mine.id = shm::UniqueId::random();
  const shm::UniqueId random = shm::UniqueId::random();
  std::memcpy(&mine.segment, random.bytes.data() + shm::UniqueId::size - sizeof mine.segment,
              sizeof mine.segment);
  mine.segment |= 1;  // never 0
  host.copy(mine.host, sizeof mine.host - 1);
  return mine;
}

std::vector<std::byte*> signal_pages(const HostBacking& file) {
  std::vector<std::byte*> pages;
  for (int r = 0; r < file.layout().size; ++r)
    pages.push_back(file.block(r) + file.layout().signal_page());
  return pages;
}

}  // namespace

std::shared_ptr<SymmetricMemory> SymmetricMemory::create(shm::Communicator& group,
                                                         std::size_t bytes,
                                                         const Options& options) {
  const std::string name = options.name.empty() ? group.name() : options.name;
  const std::string where = str("symmetric memory of group ", name);
  const Deadline deadline = Deadline::after(options.timeout);
  std::shared_ptr<shm::Communicator> own =
      group.split(0, group.rank(), shm::Options{name + " (symmetric memory)", options.timeout});
  std::string host;
  together(*own, where, deadline, [&] {
    host = host_identity();
    Layout::make(own->size(), bytes, options.channels, page_size());
    if (options.device >= 0) DeviceBacking::check(options.device);
  });
  auto all = gather_all(*own, propose(bytes, options, host), deadline);
  for (Proposal& one : all) one.host[sizeof one.host - 1] = '\0';
  require_alike(all, &Proposal::bytes, "the number of bytes", where);
  require_alike(all, &Proposal::channels, "the number of signal channels", where);
  require_alike(all, &Proposal::cuda, "the kind of device (0 host, 1 cuda)", where);
  require_alike(all, &Proposal::multicast, "multicast (0 no, 1 wanted)", where);
  require_one_host(all, where);
  const Proposal& agreed = all.front();
  auto peers = std::make_shared<Peers>(*own, deadline);

  // Host methods signal through host memory, also where the data is on devices.
  const bool cuda = options.device >= 0;
  const Layout on_host = Layout::make(own->size(), cuda ? 1 : bytes, options.channels, page_size());
  std::shared_ptr<HostBacking> file = HostBacking::open(
      *own, agreed.id, cuda ? agreed.segment ^ 2 : agreed.segment, on_host, *peers, name, deadline);
  std::shared_ptr<Backing> backing = file;
  if (cuda)
    backing = DeviceBacking::open(*own, *peers, agreed.segment, bytes, options, name, deadline);
  return std::shared_ptr<SymmetricMemory>(
      new SymmetricMemory(std::move(own), std::move(backing), std::move(file), std::move(peers),
                          name, agreed.generation, options.timeout));
}

SymmetricMemory::SymmetricMemory(std::shared_ptr<shm::Communicator> group,
                                 std::shared_ptr<Backing> backing,
                                 std::shared_ptr<HostBacking> file, std::shared_ptr<Peers> peers,
                                 std::string name, std::uint64_t generation,
                                 std::chrono::milliseconds timeout)
    : group_(std::move(group)),
      backing_(std::move(backing)),
      file_(std::move(file)),
      name_(std::move(name)),
      generation_(generation),
      timeout_(timeout),
      rank_(group_->rank()),
      fork_generation_(fork_generation()),
      peers_(std::move(peers)),
      signals_(*peers_, signal_pages(*file_), file_->layout().channels, where()),
      allocator_(backing_->layout().bytes) {}

SymmetricMemory::~SymmetricMemory() { close(); }

std::string SymmetricMemory::where() const {
  return str("symmetric memory of group ", name_, " (generation ", generation_, ")");
}

void SymmetricMemory::check_usable(const char* what) const {
  if (fork_generation_ != fork_generation())
    throw Closed(
        str(what, ", ", where(),
            ": this process is a fork of a rank, and no rank itself; make a group of its own "
            "in the child"));
  if (closed_.load()) throw Closed(str(what, ", ", where(), ": used after close()"));
}

std::size_t SymmetricMemory::allocate(std::size_t bytes, std::size_t alignment, Deadline deadline) {
  check_usable("allocate");
  struct Request {
    std::uint64_t bytes;
    std::uint64_t alignment;
  };
  const std::string what = str("allocate, ", where());
  const auto all = gather_all(*group_, Request{bytes, alignment}, deadline);
  std::vector<std::string> asked;
  bool alike = true;
  for (const Request& one : all) {
    asked.push_back(str(one.bytes, " (alignment ", one.alignment, ")"));
    alike = alike && one.bytes == bytes && one.alignment == alignment;
  }
  if (!alike)
    throw Mismatch(str(what, ": ranks ask for different bytes: ", values_by_rank(asked),
                       " (by rank); every rank must make the same allocations in the same order"));
  PYPARALLEL_REQUIRE(
      alignment != 0 && (alignment & (alignment - 1)) == 0 && alignment <= layout().granularity,
      what, ": alignment ", alignment, "; powers of two up to ", layout().granularity,
      " are possible");
  std::lock_guard<std::mutex> lock(allocator_mutex_);
  const auto offset = allocator_.allocate(bytes, alignment);
  if (!offset)
    throw NoMemory(str(what, ": ", bytes, " bytes needed, ", allocator_.bytes() - allocator_.used(),
                       " bytes free of ", allocator_.bytes(), ", the largest hole has ",
                       allocator_.largest_hole(),
                       ". Release an allocation, or make a larger memory (SymmetricMemory(group, "
                       "nbytes)) before the first use"));
  return *offset;
}

void SymmetricMemory::release(std::size_t offset, Deadline deadline) {
  check_usable("release");
  const std::string what = str("release, ", where());
  const auto all = gather_all(*group_, static_cast<std::uint64_t>(offset), deadline);
  for (std::uint64_t one : all)
    if (one != offset)
      throw Mismatch(
          str(what, ": ranks release different offsets: ", values_by_rank(all), " (by rank)"));
  std::lock_guard<std::mutex> lock(allocator_mutex_);
  PYPARALLEL_REQUIRE(allocator_.release(offset), what, ": no allocation starts at offset ", offset);
}

void SymmetricMemory::refuse(std::string_view op, std::string_view why) {
  check_usable("refuse");
  group_->refuse(op, why);
}

std::size_t SymmetricMemory::used() const {
  std::lock_guard<std::mutex> lock(allocator_mutex_);
  return allocator_.used();
}

std::byte* SymmetricMemory::data(int rank) const {
  PYPARALLEL_REQUIRE(rank >= 0 && rank < size(), "peer, ", where(), ": rank ", rank,
                     ", expected 0 to ", size() - 1);
  return backing_->block(rank);
}

std::byte* SymmetricMemory::signal_page(int rank) const {
  return data(rank) + layout().signal_page();
}

void SymmetricMemory::barrier(Deadline deadline) {
  check_usable("barrier");
  group_->barrier(deadline);
}

void SymmetricMemory::put_signal(int peer, int channel) {
  check_usable("put_signal");
  signals_.put(peer, channel);
}

void SymmetricMemory::wait_signal(int source, int channel, Deadline deadline) {
  check_usable("wait_signal");
  signals_.wait(source, channel, deadline);
}

void SymmetricMemory::abort(std::string_view why) noexcept {
  if (fork_generation_ == fork_generation()) group_->abort(why);
}

void SymmetricMemory::close() noexcept {
  if (closed_.exchange(true) || fork_generation_ != fork_generation()) return;
  signals_.leave();
  group_->close();
}

bool SymmetricMemory::closed() const { return closed_.load(); }

std::string SymmetricMemory::failure() const {
  return closed_.load() ? str(where(), ": closed") : group_->failure();
}

}  // namespace pyparallel::symmetric
