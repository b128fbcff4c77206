// Calls whose buffers lie in symmetric memory on every rank: peers read and write them in place.
//
// Protocol "zero copy" (the choice is made from the headers, so by all ranks alike)
//   begin    arrive() has ordered each rank's earlier writes to its buffer before all reads of it
//   all_reduce   rank r alone reads and writes block r of every buffer
//   others       a rank only reads its peers' buffers and writes memory of its own
//   end      each rank publishes ready = steps_ + 1 after its last access, and returns when all
//   have:
//            a buffer may be changed as soon as the call has returned
//   progress `ready` is published before it is waited for

#include <algorithm>

#include "shm/collectives.h"

namespace pyparallel::shm {
namespace {

// Below this a call goes through the inbox all the same: one wait instead of two.
constexpr std::size_t kSymmetricBytes = std::size_t{32} << 10;
// What is reduced at a time: the result is copied to further peers from the first-level cache.
constexpr std::size_t kStepBytes = std::size_t{16} << 10;
constexpr std::size_t kStreamBytes = std::size_t{8} << 20;

}  // namespace

void Collectives::announce_symmetric(const void* data, std::size_t bytes) {
  symmetric_.segment = 0;
  if (data == nullptr || bytes < kSymmetricBytes || group_.size() == 1) return;
  if (!symmetric::find(data, bytes, &symmetric_) || symmetric_.device >= 0) {
    symmetric_.segment = 0;
    return;
  }
  CallHeader& call = group_.mine();
  call.symmetric_segment = symmetric_.segment;
  call.symmetric_rank = static_cast<std::int16_t>(symmetric_.rank);
  call.symmetric_offset = symmetric_.offset;
}

bool Collectives::all_symmetric() {
  if (symmetric_.segment == 0) return false;
  const int n = group_.size();
  peers_.resize(n);
  for (int r = 0; r < n; ++r) {
    const CallHeader& header = group_.header(r);
    if (header.symmetric_segment != symmetric_.segment) return false;
    if (header.symmetric_rank < 0 || header.symmetric_rank >= symmetric_.size) return false;
    peers_[r] = symmetric_.bases[header.symmetric_rank] + header.symmetric_offset;
  }
  return true;
}

void Collectives::finish_together(const Deadline& deadline) {
  steps_ += 1;
  my_page().ready.publish(steps_);
  for (int r = 0; r < group_.size(); ++r)
    if (r != group_.rank()) wait_ready(r, steps_, deadline);
}

void Collectives::all_reduce_symmetric(std::size_t count, DType dtype, Reduction reduction,
                                       const Deadline& deadline) {
  const int n = group_.size();
  const int me = group_.rank();
  const std::size_t element = size_of(dtype);
  const std::size_t world = static_cast<std::size_t>(n);
  const std::size_t begin = count * static_cast<std::size_t>(me) / world;
  const std::size_t end = count * static_cast<std::size_t>(me + 1) / world;
  const std::size_t step = kStepBytes / element;
  ReduceArgs args = arguments(dtype, reduction);
  for (std::size_t at = begin; at < end; at += step) {
    args.count = std::min(step, end - at);
    for (int r = 0; r < n; ++r) inputs_[r] = peers_[r] + at * element;
    args.out = peers_[me] + at * element;
    args.second_out = peers_[(me + 1) % n] + at * element;
    args.second_store = to_peers_.store();
    shm::reduce(args);
    for (int i = 2; i < n; ++i)
      to_peers_.copy(peers_[(me + i) % n] + at * element, args.out, args.count * element);
  }
  finish_together(deadline);
}

void Collectives::reduce_scatter_symmetric(const ConstBlock* in, void* out, DType dtype,
                                           Reduction reduction, const Deadline& deadline) {
  const int me = group_.rank();
  const std::size_t element = size_of(dtype);
  std::size_t before_mine = 0;
  for (int r = 0; r < me; ++r) before_mine += in[r].count * element;
  ReduceArgs args = arguments(dtype, reduction);
  for (int r = 0; r < group_.size(); ++r) inputs_[r] = peers_[r] + before_mine;
  args.out = out;
  args.count = in[me].count;
  args.store = args.count * element >= kStreamBytes ? Store::streamed : Store::cached;
  shm::reduce(args);
  finish_together(deadline);
}

void Collectives::move_symmetric(const Move& move, const Deadline& deadline) {
  const int n = group_.size();
  const int me = group_.rank();
  const std::size_t element = size_of(move.dtype);
  const auto place = [&](void* out, const void* in, std::size_t count) {
    copy(out, in, count * element,
         count * element >= kStreamBytes ? Store::streamed : Store::cached);
  };
  if (move.local_out != nullptr && move.local_out != move.local.data)
    place(move.local_out, move.local.data, move.local.count);
  for (int i = 1; i < n; ++i) {
    const int from = (me + i) % n;
    const Block& block = move.receive[from];
    if (block.data != nullptr) place(block.data, peers_[from], block.count);
  }
  finish_together(deadline);
}

}  // namespace pyparallel::shm
