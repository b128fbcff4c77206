#include "symmetric/device_backing.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "base/fork.h"
#include "base/thread.h"
#include "symmetric/agreement.h"
#include "symmetric/device_open.h"

namespace pyparallel::symmetric {
namespace {

// Unmaps on a thread of its own, after the device has finished. Never destroyed: see drain.
class Reaper {
 public:
  // Threads do not survive a fork: the child gets its own.
  static Reaper& get() {
    static std::mutex mutex;
    static Reaper* instance = nullptr;
    static std::uint32_t generation = 0;
    std::lock_guard<std::mutex> lock(mutex);
    if (instance == nullptr || generation != fork_generation()) {
      instance = new Reaper;
      generation = fork_generation();
    }
    return *instance;
  }

  void add(std::unique_ptr<DeviceResources> held, int ordinal) {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.emplace_back(std::move(held), ordinal);
    changed_.notify_all();
  }

  bool drain(const Deadline& deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, deadline.remaining(),
                             [&] { return waiting_.empty() && !busy_; });
  }

 private:
  Reaper() {
    start_thread(
        "the thread that releases device memory", [this] { run(); },
        [](const std::exception_ptr&) noexcept {});  // nothing of run() throws
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !waiting_.empty(); });
      auto [held, ordinal] = std::move(waiting_.front());
      waiting_.pop_front();
      busy_ = true;
      lock.unlock();
      release(std::move(held), ordinal);
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  static void release(std::unique_ptr<DeviceResources> held, int ordinal) {
    std::optional<cuda::CurrentDevice> current;
    try {
      current.emplace(ordinal);
      cuda::Driver::get().cuCtxSynchronize();
    } catch (...) {
      // The driver is going, or the context is broken: what can still be released is.
    }
    held.reset();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<std::unique_ptr<DeviceResources>, int>> waiting_;
  bool busy_ = false;
};

// Throws Unsupported where this rank's device cannot reach a peer's that it can see.
void check_reachable(const std::vector<DeviceFacts>& facts, int rank, const std::string& where) {
  const cuda::Driver& driver = cuda::Driver::get();
  const DeviceFacts& mine = facts[static_cast<std::size_t>(rank)];
  for (std::size_t r = 0; r < facts.size(); ++r) {
    if (std::memcmp(&facts[r].uuid, &mine.uuid, sizeof mine.uuid) == 0) continue;
    for (int ordinal = 0; ordinal < driver.device_count; ++ordinal) {
      cuda::Device device = 0, own = 0;
      cuda::Uuid uuid{};
      int can = 1;
      PYPARALLEL_CUDA(cuDeviceGet(&device, ordinal));
      PYPARALLEL_CUDA(cuDeviceGetUuid_v2(&uuid, device));
      if (std::memcmp(&uuid, &facts[r].uuid, sizeof uuid) != 0) continue;
      PYPARALLEL_CUDA(cuDeviceGet(&own, mine.ordinal));
      PYPARALLEL_CUDA(cuDeviceCanAccessPeer(&can, own, device));
      if (can == 0)
        throw Unsupported(
            str(where, ": cuda:", mine.ordinal, " of rank ", rank,
                " has no peer access to the device of rank ", r, " (cuda:", ordinal,
                " here): no NVLink or PCIe peer-to-peer path (nvidia-smi topo -p2p r). "
                "NCCL works without"));
    }
  }
}

}  // namespace

bool drain_released_devices(Deadline deadline) { return Reaper::get().drain(deadline); }

void DeviceBacking::check(int ordinal) {
  const cuda::Driver& driver = cuda::Driver::get();
  PYPARALLEL_REQUIRE(ordinal >= 0 && ordinal < driver.device_count,
                     "symmetric memory: device cuda:", ordinal, ", but the driver shows ",
                     driver.device_count, " devices (CUDA_VISIBLE_DEVICES?)");
}

std::shared_ptr<DeviceBacking> DeviceBacking::open(shm::Communicator& group, const Peers& peers,
                                                   std::uint64_t segment, std::size_t bytes,
                                                   const Options& options, const std::string& name,
                                                   Deadline deadline) {
  const std::string where = str("CUDA symmetric memory of group ", name);
  DeviceFacts mine;
  together(group, where + ", asking the device", deadline,
           [&] { mine = cuda::facts_of(options.device); });
  const auto facts = gather_all(group, mine, deadline);
  together(group, where, deadline, [&] { check_reachable(facts, group.rank(), where); });
  DeviceChoice choice = choose(facts, options.multicast);
  const Layout layout = Layout::make(group.size(), bytes, options.channels, choice.granularity);

  std::optional<cuda::CurrentDevice> current;
  together(group, where + ", making the device current", deadline,
           [&] { current.emplace(options.device); });
  const DeviceGroup steps{group, peers, where, layout, current->device(), deadline};
  const auto note = [&](const std::string& text) {
    choice.notes += str(choice.notes.empty() ? "" : "; ", text);
  };

  // agree() gives every rank the same class, so that all try the next way or none does.
  for (Share share : choice.shares) {
    std::unique_ptr<DeviceResources> held;
    try {
      held = open_shared(steps, share);
    } catch (const CudaError& error) {
      note(str("no ", name_of(share), ": ", error.what()));
      continue;
    }
    if (choice.multicast && share == Share::cuda_ipc) {
      note("no multicast: it needs memory as handles");
    } else if (choice.multicast) {
      try {
        open_multicast(steps, share, held.get());
      } catch (const CudaError& error) {
        note(str("no multicast: ", error.what()));
      }
    }
    return std::make_shared<DeviceBacking>(std::move(held), share, choice.notes, options.device,
                                           group.rank(), segment, layout);
  }
  throw Unsupported(
      str(where, ": no way to share device memory between the ranks: ", choice.notes));
}

DeviceBacking::DeviceBacking(std::unique_ptr<DeviceResources> held, Share share, std::string notes,
                             int ordinal, int rank, std::uint64_t segment, const Layout& layout)
    : held_(std::move(held)),
      share_(share),
      notes_(std::move(notes)),
      ordinal_(ordinal),
      segment_(segment),
      layout_(layout),
      fork_generation_(fork_generation()) {
  SymmetricRange region;
  region.segment = segment_;
  region.rank = rank;
  region.size = layout_.size;
  region.device = ordinal_;
  region.bytes = layout_.bytes;
  region.bases = held_->blocks.data();
  region.multicast = multicast();
  registration_ = Registration(region);
}

DeviceBacking::~DeviceBacking() {
  // A forked child may not use the parent's driver: it forgets the memory.
  if (fork_generation_ != fork_generation()) {
    (void)held_.release();
    return;
  }
  registration_ = Registration();
  Reaper::get().add(std::move(held_), ordinal_);
}

}  // namespace pyparallel::symmetric
