// The algorithms behind the collectives of one communicator. One call at a time (the communicator
// holds the lock). reductions.cpp has those that add, moves.cpp those that only move.
//
// Small calls: the data travels in the inbox, beside the announcement, and one wait is all ("one
// shot"). Large calls: chunks go through three staging slots per rank, so that a rank fills one
// while its peers read another ("chunked"); see the protocols in the two files. The counters
// `ready` and `done` count chunks for ever; every rank adds the same number per call (steps_).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "shm/communicator.h"
#include "shm/group.h"
#include "shm/peer_writer.h"
#include "shm/reduce.h"
#include "symmetric/registry.h"

namespace pyparallel::shm {

class Collectives {
 public:
  explicit Collectives(Group& group) : group_(group) {}

  void all_reduce(const void* in, void* out, std::size_t count, DType, Reduction, const Deadline&);
  void reduce(const void* in, void* out, std::size_t count, DType, Reduction, int root,
              const Deadline&);
  void reduce_scatter(const ConstBlock* in, void* out, DType, Reduction, const Deadline&);
  void all_gather(const void* in, const Block* out, DType, const Deadline&);
  void all_to_all(const ConstBlock* in, const Block* out, DType, const Deadline&);
  void broadcast(void* data, std::size_t count, DType, int root, const Deadline&);
  void scatter(const ConstBlock* in, Block out, DType, int root, const Deadline&);
  void gather(ConstBlock in, const Block* out, DType, int root, const Deadline&);
  void barrier(const Deadline&);

 private:
  static constexpr int kSlots = Layout::staging_slots;

  // --- reductions.cpp
  struct TwoShot;
  ReduceArgs arguments(DType, Reduction);  // the parts that all calls share; after arrive()
  void one_shot(const void* in, void* out, std::size_t count, std::size_t inbox_offset, DType,
                Reduction);
  void two_shot(const TwoShot&, const Deadline&);

  // --- moves.cpp
  // What one rank does in one call.
  struct Move {
    Move(DType type, int root_rank, int size) : dtype(type), root(root_rank), receive(size) {}

    DType dtype;
    int root;  // -1: none
    std::vector<ConstBlock>
        send;  // one block for all readers, or one for each rank (its own is unused)
    std::vector<Block> receive;  // [size] from each rank; data null: nothing wanted
    std::vector<int> readers;    // who reads what I send
    ConstBlock local;            // what stays here ...
    void* local_out = nullptr;   // ... and where it goes

    bool send_shared = true;  // one block for all readers
    int block_for(int reader) const { return send_shared ? 0 : reader; }

    std::size_t send_count() const {
      std::size_t count = 0;
      for (const ConstBlock& block : send) count += block.count;
      return count;
    }
    std::size_t largest() const {
      std::size_t count = 0;
      for (const ConstBlock& block : send) count = std::max(count, block.count);
      return count;
    }
  };
  // scatter and gather: what the root says of all ranks' blocks and its own, and any other of its.
  template <typename AnyBlock>
  void announce_counts(const AnyBlock* blocks, std::size_t own);
  void announce_count(std::size_t count);
  void move(Move&, const Deadline&);
  void stage_whole(const Move&);
  bool all_staged() const;
  void read_whole(const Move&);
  void move_chunked(const Move&, std::size_t largest, const Deadline&);

  // --- zero_copy.cpp
  void announce_symmetric(const void* data,
                          std::size_t bytes);  // before arrive(); null: not asked for
  bool all_symmetric();                        // after it; fills peers_
  void all_reduce_symmetric(std::size_t count, DType, Reduction, const Deadline&);
  void reduce_scatter_symmetric(const ConstBlock* in, void* out, DType, Reduction, const Deadline&);
  void move_symmetric(const Move&, const Deadline&);
  void finish_together(const Deadline&);

  // --- both
  void reserve_staging(Op op, const Deadline&);
  // Where this call's slots begin: the same on all ranks, another place each time. A line that a
  // peer has just read costs several times as much to write as one that has left its cache.
  std::size_t staging_for(std::size_t bytes) const;
  bool staging_is_free(std::size_t bytes) const;
  std::size_t next_staging(std::size_t bytes);
  void wait_ready(int rank, std::uint64_t step, const Deadline& deadline) {
    group_.wait(group_.page(rank).ready, step, rank, deadline);
  }
  void wait_done(int rank, std::uint64_t step, const Deadline& deadline) {
    group_.wait(group_.page(rank).done, step, rank, deadline);
  }
  RankPage& my_page() { return group_.page(group_.rank()); }

  Group& group_;
  PeerWriter to_peers_;
  std::uint64_t steps_ = 0;
  bool staging_reserved_ = false;
  std::size_t staging_last_ = 0, staging_next_ = 0;  // where the last call staged, and up to where
  symmetric::SymmetricRange symmetric_{};            // of this call's buffer
  std::vector<std::byte*> peers_;                    // of this call: the ranks' symmetric buffers
  std::vector<const void*> inputs_;
  std::vector<double> factors_;
};

}  // namespace pyparallel::shm
