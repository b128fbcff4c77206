// The CUDA driver of the tests: a stream is a queue of functions that a thread runs in order, an
// event a mark in it. The "context" says which device is current.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

namespace {

constexpr std::uintptr_t first_context = 0xC000;  // of device 0
thread_local std::uintptr_t current = first_context;

struct Queue {
  std::deque<std::function<void()>> work;
  bool busy = false, started = false;
  std::condition_variable changed;
};

struct State {
  std::mutex mutex;
  std::map<void*, Queue> streams;
  std::set<void*> capturing;
  std::map<void*, std::uintptr_t> devices;  // of streams that have one: their contexts
};
State& state() {
  static auto* all = new State;
  return *all;
}

void serve(Queue& queue) {
  std::unique_lock<std::mutex> lock(state().mutex);
  for (;;) {
    queue.changed.wait(lock, [&] { return !queue.work.empty(); });
    const auto next = std::move(queue.work.front());
    queue.work.pop_front();
    queue.busy = true;
    lock.unlock();
    next();
    lock.lock();
    queue.busy = false;
    queue.changed.notify_all();
  }
}

void enqueue(void* stream, std::function<void()> work) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  Queue& queue = state().streams[stream];
  queue.work.push_back(std::move(work));
  if (!queue.started) std::thread([&queue] { serve(queue); }).detach();
  queue.started = true;
  queue.changed.notify_all();
}

struct Event {
  std::uintptr_t context;                   // it was made in
  std::shared_ptr<std::atomic<bool>> done;  // of the last record
};

constexpr int invalid_context = 201, invalid_handle = 400;

}  // namespace

extern "C" {

int cuCtxGetCurrent(void** context) {
  *context = reinterpret_cast<void*>(current);
  return 0;
}
int cuCtxSetCurrent(void* context) {
  current = reinterpret_cast<std::uintptr_t>(context);
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(first_context + static_cast<unsigned>(device));
  return 0;
}
int cuEventCreate(void** event, unsigned) {
  if (current == 0) return invalid_context;
  *event = new Event{current, nullptr};
  return 0;
}
int cuEventRecord(void* event, void* stream) {
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const auto home = state().devices.find(stream);
    const bool elsewhere =
        home != state().devices.end() && home->second != static_cast<Event*>(event)->context;
    if (elsewhere) return invalid_handle;
  }
  auto done = std::make_shared<std::atomic<bool>>(false);
  static_cast<Event*>(event)->done = done;
  enqueue(stream, [done] { done->store(true); });
  return 0;
}
int cuEventQuery(void* event) { return static_cast<Event*>(event)->done->load() ? 0 : 600; }
int cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  return 0;
}
int cuStreamIsCapturing(void* stream, int* capturing) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  *capturing = state().capturing.count(stream) != 0 ? 1 : 0;
  return 0;
}

// --- for the stand-in of NCCL and for tests

void standinEnqueue(void* stream, void (*call)(void*), void* argument) {
  enqueue(stream, [=] { call(argument); });
}
// Whether the stream ran dry in time.
int standinSynchronize(void* stream, int milliseconds) {
  std::unique_lock<std::mutex> lock(state().mutex);
  Queue& queue = state().streams[stream];
  return queue.changed.wait_for(lock, std::chrono::milliseconds(milliseconds),
                                [&] { return queue.work.empty() && !queue.busy; });
}
void standinSetStreamDevice(void* stream, int device) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().devices[stream] = first_context + static_cast<unsigned>(device);
}
// -1: a thread that has not touched CUDA.
void standinSetDevice(int device) {
  if (device < 0) {
    current = 0;
    return;
  }
  current = first_context + static_cast<unsigned>(device);
}
int standinDevice() { return static_cast<int>(current - first_context); }
void standinSetCapturing(void* stream, int on) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (on != 0) {
    state().capturing.insert(stream);
  } else {
    state().capturing.erase(stream);
  }
}
}
