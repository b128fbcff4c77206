#include "symmetric/registry.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "base/error.h"

namespace pyparallel::symmetric {
namespace {

std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
std::uintptr_t start_of(const SymmetricRange& r) { return address(r.bases[r.rank]); }

struct Table {
  // No address lies below `lowest` (the highest possible value while the table is empty) or at or
  // above `end`. Only a filter: a reader that passes it looks again under the lock.
  std::atomic<std::uintptr_t> lowest{UINTPTR_MAX};
  std::atomic<std::uintptr_t> end{0};
  std::shared_mutex mutex;
  std::vector<SymmetricRange> regions;  // sorted by address, disjoint

  void update_bounds() {
    lowest.store(regions.empty() ? UINTPTR_MAX : start_of(regions.front()),
                 std::memory_order_relaxed);
    end.store(regions.empty() ? 0 : start_of(regions.back()) + regions.back().bytes,
              std::memory_order_relaxed);
  }

  // The first region that starts above `where`.
  std::vector<SymmetricRange>::iterator after(std::uintptr_t where) {
    return std::upper_bound(
        regions.begin(), regions.end(), where,
        [](std::uintptr_t a, const SymmetricRange& r) { return a < start_of(r); });
  }
};

// Never destroyed: tensors may outlive static destruction. A fork waits for a writer to finish, and
// the child gets a fresh lock (one that is held by the parent's thread id could never be released
// there).
Table& table() {
  static Table* const instance = [] {
    static Table* made;
    made = new Table;
    pthread_atfork([] { made->mutex.lock(); }, [] { made->mutex.unlock(); },
                   [] { new (&made->mutex) std::shared_mutex; });
    return made;
  }();
  return *instance;
}

}  // namespace

bool find(const void* data, std::size_t bytes, SymmetricRange* range) noexcept {
  Table& t = table();
  const std::uintptr_t where = address(data);
  if (where < t.lowest.load(std::memory_order_relaxed)) return false;
  if (where >= t.end.load(std::memory_order_relaxed)) return false;
  std::shared_lock<std::shared_mutex> lock(t.mutex);
  auto next = t.after(where);
  if (next == t.regions.begin()) return false;
  const SymmetricRange& region = *std::prev(next);
  const std::size_t offset = where - start_of(region);
  if (offset >= region.bytes || bytes > region.bytes - offset) return false;
  *range = region;
  range->offset = offset;
  range->bytes = region.bytes - offset;
  return true;
}

Registration::Registration(const SymmetricRange& region) {
  Table& t = table();
  std::unique_lock<std::shared_mutex> lock(t.mutex);
  const std::uintptr_t start = start_of(region);
  auto next = t.after(start);
  const bool clear_above = next == t.regions.end() || start_of(*next) - start >= region.bytes;
  const bool clear_below =
      next == t.regions.begin() || start - start_of(*std::prev(next)) >= std::prev(next)->bytes;
  if (region.bytes == 0 || !clear_above || !clear_below)
    throw Error(Status::internal, str("symmetric memory: the region of ", region.bytes,
                                      " bytes at ", static_cast<void*>(region.bases[region.rank]),
                                      " is empty or overlaps a registered one"));
  t.regions.insert(next, region);
  t.update_bounds();
  start_ = region.bases[region.rank];
}

Registration::Registration(Registration&& other) noexcept
    : start_(std::exchange(other.start_, nullptr)) {}

Registration& Registration::operator=(Registration&& other) noexcept {
  if (this != &other) {
    Registration old(std::move(*this));
    start_ = std::exchange(other.start_, nullptr);
  }
  return *this;
}

Registration::~Registration() {
  if (start_ == nullptr) return;
  Table& t = table();
  std::unique_lock<std::shared_mutex> lock(t.mutex);
  auto next = t.after(address(start_));
  if (next == t.regions.begin()) return;
  t.regions.erase(std::prev(next));
  t.update_bounds();
}

std::size_t registered() noexcept {
  Table& t = table();
  std::shared_lock<std::shared_mutex> lock(t.mutex);
  return t.regions.size();
}

}  // namespace pyparallel::symmetric
