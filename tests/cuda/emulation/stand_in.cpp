// A libpyparallel_cuda.so whose kernels run as host threads on host memory, for tests of what is
// above it: loader, binding, Python. A stream is any number; its launches run one after another on
// a thread of its own.
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>

#include "cuda/kernels.h"
#include "emulated_world.h"

namespace pyparallel::cuda::emulation {
namespace {

class Stream {
 public:
  Stream() : worker_([this] { work(); }) { worker_.detach(); }
  void push(const Recorded& launch) {
    std::lock_guard lock(mutex_);
    queue_.push_back(launch);
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty(); });
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !queue_.empty(); });
      const Recorded launch = queue_.front();
      lock.unlock();
      run(launch);
      lock.lock();
      queue_.pop_front();
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Recorded> queue_;
  std::thread worker_;
};

Stream& stream_of(void* key) {
  static std::mutex mutex;
  static auto& streams = *new std::map<void*, Stream*>;  // outlives every worker
  std::lock_guard lock(mutex);
  Stream*& stream = streams[key];
  if (stream == nullptr) stream = new Stream;
  return *stream;
}

int capability = 90;

int launch(const Call& call, DType dtype, Grid grid, void* stream) {
  const Op op = static_cast<Op>(call.op);
  if (op == Op::all_reduce_multimem && capability < 90) return 801;
  stream_of(stream).push({host_kernel_of(op, dtype), grid, call});
  return 0;
}

std::atomic<int> prepared{0};

int prepare() {
  ++prepared;
  return 0;
}

int current_device(Device* device) {
  *device = {0, capability, 1};
  return 0;
}

const char* error_text(int error) { return error == 801 ? "operation not supported" : "?"; }

}  // namespace
}  // namespace pyparallel::cuda::emulation

extern "C" const pyparallel::cuda::KernelTable* pyparallel_cuda_kernels() {
  using namespace pyparallel::cuda;
#if defined(STAND_IN_VERSION)
  constexpr std::uint32_t version = STAND_IN_VERSION;
#else
  constexpr std::uint32_t version = KernelTable::current_version;
#endif
  static const KernelTable table = {version,
                                    sizeof(Call),
                                    emulation::launch,
                                    emulation::prepare,
                                    emulation::current_device,
                                    emulation::error_text};
  return &table;
}
extern "C" void stand_in_synchronize(void* stream) {
  pyparallel::cuda::emulation::stream_of(stream).synchronize();
}
extern "C" int stand_in_prepared() { return pyparallel::cuda::emulation::prepared; }
extern "C" void stand_in_capability(int value) { pyparallel::cuda::emulation::capability = value; }
