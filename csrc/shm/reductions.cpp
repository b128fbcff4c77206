// all_reduce, reduce, reduce_scatter.
//
// Protocol "two shot" (n chunks; chunk k of block r goes to its owner r, who adds the blocks of all
// ranks in rank order; slot k % 3 of each rank's staging holds its chunk k for the others, result
// slot k % 3 what it has reduced). Iteration j of each rank is A(j+1), B(j), C(j-1):
//   A(k)  copies this rank's parts of chunk k into staging slot k % 3, publishes ready = k + 1
//   B(k)  waits for ready >= k + 1 of all; reduces its own part; result slot; publishes done = k +
//   1 C(k)  waits for done >= k + 1 of all; copies the others' results out (where wanted) reuse
//   A(j+1) overwrites chunk j-2 of staging, read by the owners in B(j-2): C(j-2) has waited for it.
//         B(j) overwrites chunk j-3 of the result, read in C(j-3): a rank publishes ready = j + 1
//         in its iteration j-1, after its C(j-3), and B(j) has waited for that of all ranks.
//   progress  A waits for nothing, B only for A of the same chunk, C only for B of the same chunk
// (Numbers are relative to steps_, the chunks of all earlier calls.)

#include <algorithm>
#include <cstring>

#include "shm/blocks.h"
#include "shm/collectives.h"

namespace pyparallel::shm {
namespace {

// Up to this many bytes read from peers, one wait and redundant arithmetic beat two waits.
constexpr std::size_t kOneShotBytes = std::size_t{128} << 10;
// From here on the result will not be in any cache when it is read next.
constexpr std::size_t kStreamBytes = std::size_t{8} << 20;

}  // namespace

struct Collectives::TwoShot {
  std::vector<ConstBlock> in;  // by owner
  std::vector<void*> out;      // by owner: where its result goes here; null: not wanted
  DType dtype = DType::f32;
  Reduction reduction;
  bool shared = true;  // some other rank copies my result
};

ReduceArgs Collectives::arguments(DType dtype, Reduction reduction) {
  const int n = group_.size();
  inputs_.resize(n);
  factors_.resize(n);
  for (int r = 0; r < n; ++r) factors_[r] = group_.header(r).factor;
  ReduceArgs args;
  args.inputs = inputs_.data();
  args.n = n;
  args.dtype = dtype;
  args.op = reduction.op;
  args.factors = factors_.data();
  args.divisor = n;
  return args;
}

void Collectives::one_shot(const void* in, void* out, std::size_t count, std::size_t inbox_offset,
                           DType dtype, Reduction reduction) {
  ReduceArgs args = arguments(dtype, reduction);
  for (int r = 0; r < group_.size(); ++r) inputs_[r] = group_.inbox(r) + inbox_offset;
  inputs_[group_.rank()] = in;
  args.out = out;
  args.count = count;
  shm::reduce(args);
}

void Collectives::two_shot(const TwoShot& call, const Deadline& deadline) {
  const int n = group_.size();
  const int me = group_.rank();
  const std::size_t element = size_of(call.dtype);
  const std::size_t world = static_cast<std::size_t>(n);

  std::size_t largest = 0;
  std::size_t total = 0;
  for (const ConstBlock& block : call.in) {
    largest = std::max(largest, block.count);
    total += block.count;
  }
  // Each slot of staging holds a part per owner, and one of the result.
  const Chunks cut = Chunks::of(group_.layout().staging_bytes(), world + 1, largest, element);
  const std::size_t part = cut.part, step = cut.step, chunks = cut.number, slots = cut.slots;
  const Store store = total * element >= kStreamBytes ? Store::streamed : Store::cached;

  const std::size_t base = next_staging(slots * (world + 1) * part);
  const auto staged = [&](int rank, std::size_t chunk, int owner) {
    return group_.staging(rank) + base +
           ((chunk % slots) * world + static_cast<std::size_t>(owner)) * part;
  };
  const auto result = [&](int rank, std::size_t chunk) {
    return group_.staging(rank) + base + (slots * world + chunk % slots) * part;
  };
  const auto length = [&](int owner, std::size_t chunk) {
    return cut.length(call.in[owner].count, chunk);
  };

  const auto a = [&](std::size_t k) {
    for (int i = 1; i < n; ++i) {
      const int owner = (me + i) % n;
      to_peers_.copy(staged(me, k, owner), bytes_at(call.in[owner].data, k * step * element),
                     length(owner, k) * element);
    }
    my_page().ready.publish(steps_ + k + 1);
  };
  ReduceArgs args = arguments(call.dtype, call.reduction);
  const auto b = [&](std::size_t k) {
    for (int i = 1; i < n; ++i) {
      const int r = (me + i) % n;
      wait_ready(r, steps_ + k + 1, deadline);
      inputs_[r] = staged(r, k, me);
    }
    inputs_[me] = bytes_at(call.in[me].data, k * step * element);
    args.count = length(me, k);
    if (call.out[me] != nullptr) {
      args.out = bytes_at(call.out[me], k * step * element);
      args.second_out = call.shared ? result(me, k) : nullptr;
      args.second_store = to_peers_.store();
      args.store = store;
    } else {
      args.out = result(me, k);
      args.store = to_peers_.store();
    }
    if (args.count != 0) shm::reduce(args);
    my_page().done.publish(steps_ + k + 1);
  };
  const auto c = [&](std::size_t k) {
    for (int i = 1; i < n; ++i) {
      const int r = (me + i) % n;
      wait_done(r, steps_ + k + 1, deadline);
      if (call.out[r] != nullptr)
        copy(bytes_at(call.out[r], k * step * element), result(r, k), length(r, k) * element,
             store);
    }
  };

  if (chunks > 0) a(0);
  for (std::size_t j = 0; j <= chunks; ++j) {
    if (j + 1 < chunks) a(j + 1);
    if (j < chunks) b(j);
    if (j > 0) c(j - 1);
  }
  steps_ += chunks;
}

// Where the next call stages `bytes`: alike on all ranks, as they make the same calls.
std::size_t Collectives::staging_for(std::size_t bytes) const {
  return staging_next_ + bytes > group_.layout().staging_bytes() ? 0 : staging_next_;
}

// Whether that is beside what the last call has staged, which peers may still be reading.
bool Collectives::staging_is_free(std::size_t bytes) const {
  return staging_for(bytes) == staging_next_ ? bytes <= group_.layout().staging_bytes()
                                             : bytes <= staging_last_;
}

std::size_t Collectives::next_staging(std::size_t bytes) {
  staging_last_ = staging_for(bytes);
  staging_next_ = staging_last_ + bytes;
  return staging_last_;
}

void Collectives::reserve_staging(Op op, const Deadline& deadline) {
  if (staging_reserved_) return;
  try {
    group_.reserve(group_.layout().staging(group_.rank()), group_.layout().staging_bytes());
  } catch (const Error& error) {
    group_.refuse(name_of(op), error.what(), deadline);
    throw;
  }
  staging_reserved_ = true;
}

void Collectives::all_reduce(const void* in, void* out, std::size_t count, DType dtype,
                             Reduction reduction, const Deadline& deadline) {
  const int n = group_.size();
  const std::size_t bytes = count * size_of(dtype);
  const std::size_t from_peers = bytes * static_cast<std::size_t>(n - 1);
  const bool small =
      n == 1 || (bytes <= group_.layout().inline_bytes() && from_peers <= kOneShotBytes);
  if (!small) reserve_staging(Op::all_reduce, deadline);

  group_.begin(Op::all_reduce, deadline);
  CallHeader& call = group_.mine();
  call.dtype = dtype;
  call.reduction = reduction.op;
  call.count = count;
  call.factor = reduction.factor;
  announce_symmetric(in == out ? in : nullptr, bytes);
  if (small && n > 1) to_peers_.copy(group_.inbox(group_.rank()), in, bytes);
  group_.arrive(deadline);

  if (all_symmetric()) return all_reduce_symmetric(count, dtype, reduction, deadline);
  if (small) return one_shot(in, out, count, 0, dtype, reduction);
  TwoShot two;
  two.dtype = dtype;
  two.reduction = reduction;
  const std::size_t world = static_cast<std::size_t>(n);
  for (std::size_t r = 0; r < world; ++r) {
    // Borders on cache lines of the result, so that no two ranks' copies share one.
    const auto border = [&](std::size_t i) {
      const std::size_t line = std::max<std::size_t>(1, 64 / size_of(dtype));
      return i == world ? count : std::min(count, (count * i / world + line - 1) / line * line);
    };
    two.in.push_back({bytes_at(in, border(r) * size_of(dtype)), border(r + 1) - border(r)});
    two.out.push_back(bytes_at(out, border(r) * size_of(dtype)));
  }
  two_shot(two, deadline);
}

void Collectives::reduce(const void* in, void* out, std::size_t count, DType dtype,
                         Reduction reduction, int root, const Deadline& deadline) {
  const std::size_t bytes = count * size_of(dtype);
  const bool small = group_.size() == 1 || bytes <= group_.layout().inline_bytes();
  if (!small) reserve_staging(Op::reduce, deadline);

  group_.begin(Op::reduce, deadline);
  CallHeader& call = group_.mine();
  call.dtype = dtype;
  call.reduction = reduction.op;
  call.root = static_cast<std::int16_t>(root);
  call.count = count;
  call.factor = reduction.factor;
  const bool is_root = group_.rank() == root;
  if (small && !is_root) to_peers_.copy(group_.inbox(group_.rank()), in, bytes);
  group_.arrive(deadline);

  if (small) {
    if (is_root) one_shot(in, out, count, 0, dtype, reduction);
    return;
  }
  TwoShot two;
  two.dtype = dtype;
  two.reduction = reduction;
  two.shared = !is_root;
  const std::size_t world = static_cast<std::size_t>(group_.size());
  for (std::size_t r = 0; r < world; ++r) {
    const std::size_t begin = count * r / world;
    two.in.push_back({bytes_at(in, begin * size_of(dtype)), count * (r + 1) / world - begin});
    two.out.push_back(is_root ? bytes_at(out, begin * size_of(dtype)) : nullptr);
  }
  two_shot(two, deadline);
}

void Collectives::reduce_scatter(const ConstBlock* in, void* out, DType dtype, Reduction reduction,
                                 const Deadline& deadline) {
  const int n = group_.size();
  const int me = group_.rank();
  const std::size_t element = size_of(dtype);
  std::size_t total = 0;
  for (int r = 0; r < n; ++r) total += in[r].count;
  const bool small = n == 1 || total * element <= group_.layout().inline_bytes();
  if (!small) reserve_staging(Op::reduce_scatter, deadline);

  group_.begin(Op::reduce_scatter, deadline);
  CallHeader& call = group_.mine();
  call.dtype = dtype;
  call.reduction = reduction.op;
  call.count = in[me].count;
  call.digest = digest_of(in, n);
  call.factor = reduction.factor;
  bool contiguous = true;
  for (int r = 1; r < n; ++r)
    contiguous = contiguous && in[r].data == bytes_at(in[r - 1].data, in[r - 1].count * element);
  announce_symmetric(contiguous ? in[0].data : nullptr, total * element);
  std::size_t before_mine = 0;
  if (small) {
    std::size_t offset = 0;
    for (int r = 0; r < n; ++r) {
      if (r == me) before_mine = offset;
      if (r != me) to_peers_.copy(group_.inbox(me) + offset, in[r].data, in[r].count * element);
      offset += in[r].count * element;
    }
  }
  group_.arrive(deadline);

  if (all_symmetric()) return reduce_scatter_symmetric(in, out, dtype, reduction, deadline);
  if (small) return one_shot(in[me].data, out, in[me].count, before_mine, dtype, reduction);
  TwoShot two;
  two.dtype = dtype;
  two.reduction = reduction;
  two.shared = false;
  two.in.assign(in, in + n);
  two.out.assign(n, nullptr);
  two.out[me] = out;
  two_shot(two, deadline);
}

}  // namespace pyparallel::shm
