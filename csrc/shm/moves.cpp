// all_gather, all_to_all, broadcast, scatter, gather, barrier: data moves and nothing is added.
//
// A sender whose data fits its inbox puts it there before it announces the call, and is done. The
// others' data goes through staging, of an all_to_all up to kWholeBytes in one piece and before the
// announcement as well, so that the ranks meet once:
// Protocol "whole move" (base: the place in all ranks' staging, which is the next to be used)
//   sender   fills its part of staging from base on, then announces the call
//   reader   has seen all announcements, so reads at once
//   reuse    base is not in what the last call staged, which a slow rank may still be reading; of
//            any call before that all are through, since all have announced the last one
// Protocol "chunked move" (n chunks, the same on all ranks: the largest block of those senders)
//   sender   waits, from chunk 3 on, for done >= k - 2 of all who read it; fills slot k % 3;
//            publishes ready = k + 1
//   reader   waits for ready >= k + 1 of each sender with something for it; copies; publishes done
//   = k + 1 order    a rank that does both fills chunk j before it reads chunk j - 1 progress
//   filling chunk j waits for reads of chunk j - 3, reading chunk j for its filling: no cycle
// (Numbers are relative to steps_, the chunks of all earlier calls.)

#include <algorithm>
#include <cstring>

#include "shm/blocks.h"
#include "shm/collectives.h"

namespace pyparallel::shm {
namespace {

// Up to this many bytes a sender uses its inbox.
constexpr std::size_t kInlineBytes = std::size_t{32} << 10;
// Up to this many bytes for one rank an all_to_all is staged whole. More gain from being read while
// the rest is written than they lose by waiting for each chunk.
constexpr std::size_t kWholeBytes = std::size_t{256} << 10;
// A received block from here on is written past the caches.
constexpr std::size_t kStreamBytes = std::size_t{2} << 20;

}  // namespace

// `move` has begun: the header's sizes are filled in, nothing is announced yet.
void Collectives::move(Move& move, const Deadline& deadline) {
  const int n = group_.size();
  const int me = group_.rank();
  const std::size_t element = size_of(move.dtype);
  CallHeader& call = group_.mine();
  call.dtype = move.dtype;
  call.root = static_cast<std::int16_t>(move.root);
  if (move.readers.empty()) {
    call.flags |= CallHeader::kInline;
  } else if (move.send_count() * element <=
             std::min(kInlineBytes, group_.layout().inline_bytes())) {
    call.flags |= CallHeader::kInline;
    std::size_t offset = 0;
    for (const ConstBlock& block : move.send) {
      to_peers_.copy(group_.inbox(me) + offset, block.data, block.count * element);
      offset += block.count * element;
    }
  } else {
    stage_whole(move);
  }
  group_.arrive(deadline);
  if (all_symmetric()) return move_symmetric(move, deadline);
  if (all_staged()) return read_whole(move);

  std::size_t largest = 0;
  for (int r = 0; r < n; ++r)
    if (!group_.header(r).is_inline())
      largest = std::max<std::size_t>(largest, group_.header(r).count);

  for (int i = 1; i < n; ++i) {
    const int from = (me + i) % n;
    const Block& block = move.receive[from];
    if (block.data == nullptr || !group_.header(from).is_inline()) continue;
    std::size_t offset = 0;
    if (!move.send_shared) {
      // A sender's inbox holds its blocks in rank order, without its own.
      const bool uniform = group_.header(from).uniform();
      for (int to = 0; to < me; ++to)
        if (to != from) offset += uniform ? group_.header(from).count : group_.counts(from)[to];
    }
    copy(block.data, group_.inbox(from) + offset * element, block.count * element, Store::cached);
  }
  if (largest > 0) return move_chunked(move, largest, deadline);
  if (move.local_out != nullptr && move.local_out != move.local.data)
    copy(move.local_out, move.local.data, move.local.count * element, Store::cached);
}

// Fills this rank's staging before the call is announced, where that is the better way.
void Collectives::stage_whole(const Move& move) {
  CallHeader& call = group_.mine();
  const std::size_t bytes = call.count * size_of(move.dtype);
  if (move.send_shared || move.root >= 0 || !call.uniform() || bytes > kWholeBytes) return;
  const std::size_t blocks = move.send.size();
  if (!staging_is_free(blocks * bytes)) return;
  std::byte* place = group_.staging(group_.rank()) + staging_for(blocks * bytes);
  for (const ConstBlock& block : move.send) {
    to_peers_.copy(place, block.data, block.count * size_of(move.dtype));
    place += bytes;
  }
  call.flags |= CallHeader::kStaged;
}

bool Collectives::all_staged() const {
  for (int r = 0; r < group_.size(); ++r)
    if (!group_.header(r).staged()) return false;
  return true;
}

void Collectives::read_whole(const Move& move) {
  const int n = group_.size();
  const int me = group_.rank();
  const std::size_t bytes = move.local.count * size_of(move.dtype);  // of any block
  const std::size_t base = next_staging(static_cast<std::size_t>(n) * bytes);
  for (int i = 1; i < n; ++i) {
    const int from = (me + i) % n;
    const std::byte* blocks = group_.staging(from) + base;
    copy(move.receive[from].data, blocks + static_cast<std::size_t>(me) * bytes, bytes,
         Store::cached);
  }
  if (move.local_out != move.local.data)
    copy(move.local_out, move.local.data, bytes, Store::cached);
}

void Collectives::move_chunked(const Move& move, std::size_t largest, const Deadline& deadline) {
  const int n = group_.size();
  const int me = group_.rank();
  const std::size_t element = size_of(move.dtype);
  const std::size_t blocks = move.send_shared ? 1 : static_cast<std::size_t>(n);
  const Chunks cut = Chunks::of(group_.layout().staging_bytes(), blocks, largest, element);
  const std::size_t part = cut.part, step = cut.step, chunks = cut.number, slots = cut.slots;
  const std::size_t base = next_staging(slots * blocks * part);
  const Store store = largest * element >= kStreamBytes ? Store::streamed : Store::cached;
  const bool sends = !group_.mine().is_inline();
  const bool stays = move.local_out != nullptr && move.local_out != move.local.data;

  const auto slot = [&](int rank, std::size_t chunk, int block) {
    return group_.staging(rank) + base +
           ((chunk % slots) * blocks + static_cast<std::size_t>(block)) * part;
  };
  const auto fill = [&](std::size_t k) {
    if (sends) {
      if (k >= kSlots)
        for (const int reader : move.readers) wait_done(reader, steps_ + k - kSlots + 1, deadline);
      for (std::size_t b = 0; b < move.send.size(); ++b) {
        const ConstBlock& block = move.send[b];
        to_peers_.copy(slot(me, k, static_cast<int>(b)), bytes_at(block.data, k * step * element),
                       cut.length(block.count, k) * element);
      }
      my_page().ready.publish(steps_ + k + 1);
    }
    // The chunk that stays is copied while it is in the cache.
    if (stays)
      copy(bytes_at(move.local_out, k * step * element),
           bytes_at(move.local.data, k * step * element), cut.length(move.local.count, k) * element,
           store);
  };
  const auto read = [&](std::size_t k) {
    for (int i = 1; i < n; ++i) {
      const int from = (me + i) % n;
      const Block& block = move.receive[from];
      const std::size_t count = cut.length(block.count, k);
      if (block.data == nullptr || count == 0 || group_.header(from).is_inline()) continue;
      wait_ready(from, steps_ + k + 1, deadline);
      copy(bytes_at(block.data, k * step * element), slot(from, k, move.block_for(me)),
           count * element, store);
    }
    my_page().done.publish(steps_ + k + 1);
  };
  for (std::size_t j = 0; j <= chunks; ++j) {
    if (j < chunks) fill(j);
    if (j > 0) read(j - 1);
  }
  // A block that stays may be longer than all that is sent.
  const std::size_t copied = std::min(move.local.count, chunks * step);
  if (stays)
    copy(bytes_at(move.local_out, copied * element), bytes_at(move.local.data, copied * element),
         (move.local.count - copied) * element, store);
  steps_ += chunks;
}

void Collectives::all_gather(const void* in, const Block* out, DType dtype,
                             const Deadline& deadline) {
  const int n = group_.size();
  const int me = group_.rank();
  reserve_staging(Op::all_gather, deadline);
  group_.begin(Op::all_gather, deadline);
  group_.mine().digest = digest_of(out, n);
  group_.mine().count = out[me].count;
  announce_symmetric(in, out[me].count * size_of(dtype));
  Move move(dtype, -1, n);
  move.send = {{in, out[me].count}};
  move.receive.assign(out, out + n);
  for (int r = 0; r < n; ++r)
    if (r != me) move.readers.push_back(r);
  move.local = {in, out[me].count};
  move.local_out = out[me].data;
  this->move(move, deadline);
}

void Collectives::broadcast(void* data, std::size_t count, DType dtype, int root,
                            const Deadline& deadline) {
  const int n = group_.size();
  reserve_staging(Op::broadcast, deadline);
  group_.begin(Op::broadcast, deadline);
  group_.mine().count = count;
  announce_symmetric(data, count * size_of(dtype));
  Move move(dtype, root, n);
  if (group_.rank() == root) {
    move.send = {{data, count}};
    for (int r = 0; r < n; ++r)
      if (r != root) move.readers.push_back(r);
  } else {
    move.receive[root] = {data, count};
  }
  this->move(move, deadline);
}

void Collectives::all_to_all(const ConstBlock* in, const Block* out, DType dtype,
                             const Deadline& deadline) {
  const int n = group_.size();
  const int me = group_.rank();
  reserve_staging(Op::all_to_all, deadline);
  group_.begin(Op::all_to_all, deadline);
  Move move(dtype, -1, n);
  move.send_shared = false;
  move.send.assign(in, in + n);
  move.receive.assign(out, out + n);
  bool uniform = true;
  for (int r = 0; r < n; ++r)
    uniform = uniform && in[r].count == in[0].count && out[r].count == in[0].count;
  if (uniform) {
    group_.mine().flags |= CallHeader::kUniform;
  } else {
    for (int r = 0; r < n; ++r) {
      group_.counts(me)[r] = in[r].count;
      group_.counts(me)[n + r] = out[r].count;
    }
  }
  move.local = in[me];
  move.local_out = out[me].data;
  if (in[me].count != out[me].count) move.local_out = nullptr;  // a misfit: arrive() raises
  move.send[me].count = 0;
  for (int r = 0; r < n; ++r)
    if (r != me) move.readers.push_back(r);
  group_.mine().count = uniform ? in[0].count : move.largest();
  this->move(move, deadline);
}

void Collectives::announce_count(std::size_t count) {
  group_.mine().flags |= CallHeader::kUniform;
  group_.mine().count = count;
}

// Equal blocks need no table, which the peers would have to fetch.
template <typename AnyBlock>
void Collectives::announce_counts(const AnyBlock* blocks, std::size_t own) {
  const int n = group_.size();
  const auto first = blocks[0].count;
  if (own == first && std::all_of(blocks, blocks + n,
                                  [first](const AnyBlock& block) { return block.count == first; }))
    return announce_count(first);
  std::uint64_t* counts = group_.counts(group_.rank());
  for (int r = 0; r < n; ++r) {
    counts[r] = blocks[r].count;
    group_.mine().count = std::max<std::uint64_t>(group_.mine().count, counts[r]);
  }
  counts[n] = own;
}

void Collectives::scatter(const ConstBlock* in, Block out, DType dtype, int root,
                          const Deadline& deadline) {
  const int n = group_.size();
  const int me = group_.rank();
  reserve_staging(Op::scatter, deadline);
  group_.begin(Op::scatter, deadline);
  Move move(dtype, root, n);
  move.send_shared = false;
  if (me == root) {
    announce_counts(in, out.count);
    move.send.assign(in, in + n);
    for (int r = 0; r < n; ++r)
      if (r != root) move.readers.push_back(r);
    move.local = {in[me].data, std::min(in[me].count, out.count)};
    move.local_out = out.data;
    move.send[me].count = 0;
  } else {
    announce_count(out.count);
    move.receive[root] = out;
  }
  this->move(move, deadline);
}

void Collectives::gather(ConstBlock in, const Block* out, DType dtype, int root,
                         const Deadline& deadline) {
  const int n = group_.size();
  const int me = group_.rank();
  reserve_staging(Op::gather, deadline);
  group_.begin(Op::gather, deadline);
  Move move(dtype, root, n);
  if (me == root) {
    announce_counts(out, in.count);
    move.receive.assign(out, out + n);
    move.local = {in.data, std::min(in.count, out[me].count)};
    move.local_out = out[me].data;
  } else {
    announce_count(in.count);
    move.send = {in};
    move.readers = {root};
  }
  this->move(move, deadline);
}

void Collectives::barrier(const Deadline& deadline) {
  group_.begin(Op::barrier, deadline);
  group_.arrive(deadline);
}

}  // namespace pyparallel::shm
