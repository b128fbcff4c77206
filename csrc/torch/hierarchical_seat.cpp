// Messages, sub-groups and the life of a rank in a group of several hosts.
#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/observer.h"
#include "torch/hierarchical.h"

namespace pyparallel::dist {
namespace {

// A message that was started inside the host, its source as a rank of the whole group.
class LocalMessage final : public shm::Work {
 public:
  LocalMessage(std::shared_ptr<shm::Work> inner, int source)
      : inner_(std::move(inner)), source_(source) {}
  bool done() const override { return inner_->done(); }
  void wait(Deadline deadline) override { inner_->wait(deadline); }
  int source() const override { return source_; }

 private:
  const std::shared_ptr<shm::Work> inner_;
  const int source_;
};

}  // namespace

// --- messages

std::shared_ptr<shm::Work> HierarchicalCommunicator::isend(const void* data, std::size_t count,
                                                           DType dtype, int destination,
                                                           std::int64_t tag) {
  throw_if_failed();
  check_rank("send to rank", destination);
  if (is_local(destination)) {
    return local_->isend(data, count, dtype, local_index(destination), tag);
  }
  return messages_->send(data, count, dtype, destination, tag, timeout());
}

std::shared_ptr<shm::Work> HierarchicalCommunicator::irecv(void* data, std::size_t count,
                                                           DType dtype, int source,
                                                           std::int64_t tag) {
  throw_if_failed();
  if (source == any_source) {
    CrossMessages::check_tag(
        pyparallel::str("receive from any rank (tag ", tag, ", group ", seat_.group, ")"), tag);
    auto local = local_->irecv(data, count, dtype, any_source, tag);
    return messages_->receive_any(data, count, dtype, tag, timeout(), std::move(local),
                                  local_ranks());
  }
  check_rank("receive from rank", source);
  if (!is_local(source)) return messages_->receive(data, count, dtype, source, tag, timeout());
  return std::make_shared<LocalMessage>(local_->irecv(data, count, dtype, local_index(source), tag),
                                        source);
}

void HierarchicalCommunicator::send(const void* data, std::size_t count, DType dtype,
                                    int destination, std::int64_t tag, Deadline deadline) {
  const Observed observed("send", seat_.group);
  isend(data, count, dtype, destination, tag)->wait(deadline);
}

int HierarchicalCommunicator::recv(void* data, std::size_t count, DType dtype, int source,
                                   std::int64_t tag, Deadline deadline) {
  const Observed observed("recv", seat_.group);
  const auto started = irecv(data, count, dtype, source, tag);
  started->wait(deadline);
  return started->source();
}

// --- life

std::shared_ptr<shm::Communicator> HierarchicalCommunicator::split(int color, int key,
                                                                   const shm::Options& options) {
  struct Entry {
    std::int32_t color;
    std::int32_t key;
  };
  const Entry mine{color, key};
  std::vector<Entry> entries(static_cast<std::size_t>(size()));
  std::vector<shm::Block> blocks;
  for (Entry& entry : entries) blocks.push_back({&entry, sizeof(Entry)});
  all_gather(&mine, blocks.data(), DType::u8, Deadline::after(options.timeout));
  const std::uint64_t number = sequence();
  if (color < 0) return nullptr;

  std::vector<int> members;
  for (int rank = 0; rank < size(); ++rank) {
    if (entries[static_cast<std::size_t>(rank)].color == color) members.push_back(rank);
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return entries[static_cast<std::size_t>(a)].key < entries[static_cast<std::size_t>(b)].key;
  });
  Seat seat;
  seat.store = c10::make_intrusive<c10d::PrefixStore>(
      pyparallel::str(topology_.prefix, "split/", number, "/", color, "/"), seat_.store);
  seat.rank =
      static_cast<int>(std::find(members.begin(), members.end(), seat_.rank) - members.begin());
  seat.size = static_cast<int>(members.size());
  seat.group = options.name;
  seat.timeout = options.timeout;
  return open_group(seat, gloo_);
}

void HierarchicalCommunicator::fail(const Error& error) noexcept {
  {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    if (!failure_.empty()) return;
    failure_status_ = error.status();
    failure_ = error.what();
  }
  local_->abort(error.what());
  messages_->abort();
  if (links_) links_->abort();
}

void HierarchicalCommunicator::throw_if_failed() const {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (!failure_.empty()) throw_status(failure_status_, failure_);
}

void HierarchicalCommunicator::abort(std::string_view why) noexcept {
  fail(
      Aborted(pyparallel::str("group ", seat_.group, ": aborted by rank ", seat_.rank, ": ", why)));
}

void HierarchicalCommunicator::close() noexcept {
  worker_.close();
  if (messages_) messages_->abort();
  if (links_) links_->abort();
  local_->close();
}

std::string HierarchicalCommunicator::failure() const {
  {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    if (!failure_.empty()) return failure_;
  }
  return local_->failure();
}

int HierarchicalCommunicator::pid_of(int rank) const {
  check_rank("pid_of rank", rank);
  return is_local(rank) ? local_->pid_of(local_index(rank)) : 0;
}

}  // namespace pyparallel::dist
