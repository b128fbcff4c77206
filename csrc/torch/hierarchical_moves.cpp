// Movement of data between ranks of several hosts. Blocks are packed host by host: what goes from
// one host to another is one piece.
#include "torch/hierarchical.h"
#include "torch/packing.h"

namespace pyparallel::dist {
void HierarchicalCommunicator::broadcast(void* data, std::size_t count, DType dtype, int root,
                                         Deadline deadline) {
  Call call;
  call.op = Op::broadcast;
  call.dtype = dtype;
  call.root = root;
  call.count = count;
  collective(
      call, deadline, [&] { check_rank("root", root); },
      [&] {
        if (count == 0) return;
        const std::size_t size = count * size_of(dtype);
        if (is_local(root)) local_->broadcast(data, count, dtype, local_index(root), deadline);
        if (is_leader()) {
          std::vector<Links::Transfer> sends;
          for (int h = 0; h < hosts(); ++h) {
            if (h != host_ && is_local(root)) sends.push_back({h, data, size});
          }
          std::vector<Links::Transfer> receives;
          if (!is_local(root)) receives.push_back({host_of(root), data, size});
          transfer(sends, receives, deadline);
        }
        if (!is_local(root)) local_->broadcast(data, count, dtype, 0, deadline);
      });
}

// Each host gathers its own blocks, the leaders exchange them, and share what came with their
// hosts.
void HierarchicalCommunicator::all_gather(const void* in, const shm::Block* out, DType dtype,
                                          Deadline deadline) {
  Call call;
  call.op = Op::all_gather;
  call.dtype = dtype;
  Counts counts;
  for (int rank = 0; rank < size(); ++rank) {
    counts.push_back(static_cast<std::int64_t>(out[rank].count));
    call.count += out[rank].count;
  }
  call.digest = digest_of(counts);
  collective(
      call, deadline, [] {},
      [&] {
        std::vector<shm::Block> local;
        for (const int rank : local_ranks()) local.push_back(out[rank]);
        local_->all_gather(in, local.data(), dtype, deadline);

        std::vector<at::Tensor> packs;  // one per host
        for (int h = 0; h < hosts(); ++h) {
          std::size_t size = 0;
          for (const int rank : ranks_of(h)) size += out[rank].count * size_of(dtype);
          packs.push_back(bytes(h == host_ && !is_leader() ? 0 : size));
        }
        if (is_leader()) {
          const at::Tensor& own = packs[static_cast<std::size_t>(host_)];
          std::size_t offset = 0;
          for (const shm::Block& block : local) {
            copy_bytes(byte_at(own, offset), block.data, block.count * size_of(dtype));
            offset += block.count * size_of(dtype);
          }
          std::vector<Links::Transfer> sends;
          std::vector<Links::Transfer> receives;
          for (int h = 0; h < hosts(); ++h) {
            if (h == host_) continue;
            const at::Tensor& theirs = packs[static_cast<std::size_t>(h)];
            sends.push_back({h, own.data_ptr(), own.nbytes()});
            receives.push_back({h, theirs.data_ptr(), theirs.nbytes()});
          }
          transfer(sends, receives, deadline);
        }
        for (int h = 0; h < hosts(); ++h) {
          if (h == host_) continue;
          const at::Tensor& pack = packs[static_cast<std::size_t>(h)];
          local_->broadcast(pack.data_ptr(), pack.nbytes(), DType::u8, 0, deadline);
          std::size_t offset = 0;
          for (const int rank : ranks_of(h)) {
            copy_bytes(out[rank].data, byte_at(pack, offset), out[rank].count * size_of(dtype));
            offset += out[rank].count * size_of(dtype);
          }
        }
      });
}

// Rows of the counts: a rank's own, then on the root the one it has for each rank.
std::string HierarchicalCommunicator::check_root_counts(const std::vector<Counts>& rows,
                                                        int root) const {
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    const std::int64_t at_root = rows[static_cast<std::size_t>(root)][1 + rank];
    if (rows[rank][0] == at_root) continue;
    return pyparallel::str("rank ", rank, " has ", rows[rank][0], " elements, the root, rank ",
                           root, ", has ", at_root, " for it");
  }
  return {};
}

// What scatter and gather start with: the counts, on which the root and every rank agree (else all
// throw), and where each host's blocks lie in the root's packed array.
HierarchicalCommunicator::Rooted HierarchicalCommunicator::agree_with_root(std::size_t own,
                                                                           const Counts& at_root,
                                                                           int root, DType dtype,
                                                                           Deadline deadline) {
  Counts mine = at_root;
  mine.resize(static_cast<std::size_t>(size()), 0);
  mine.insert(mine.begin(), static_cast<std::int64_t>(own));
  Rooted rooted;
  rooted.rows = exchange_counts(mine, deadline);
  share_finding(rooted.rows.empty() ? "" : check_root_counts(rooted.rows, root), deadline);
  // Ranks that are neither root nor leader have nothing to place.
  const bool knows = is_leader() || seat_.rank == root;
  const Counts& row = is_leader() ? rooted.rows[static_cast<std::size_t>(root)] : mine;
  for (int h = 0; h < hosts(); ++h) {
    rooted.begin.push_back(rooted.total);
    for (const int rank : ranks_of(h)) {
      const auto count = static_cast<std::size_t>(row[1 + static_cast<std::size_t>(rank)]);
      if (knows) rooted.total += count * size_of(dtype);
    }
  }
  rooted.begin.push_back(rooted.total);
  return rooted;
}

// The leader's view of `own`, the blocks of its host; nothing on other ranks.
std::vector<shm::Block> HierarchicalCommunicator::blocks_of_host(const at::Tensor& own,
                                                                 const Rooted& rooted,
                                                                 DType dtype) const {
  std::vector<shm::Block> blocks;
  std::size_t offset = 0;
  for (std::size_t i = 0; is_leader() && i < local_ranks().size(); ++i) {
    const auto rank = static_cast<std::size_t>(local_ranks()[i]);
    const auto count = static_cast<std::size_t>(rooted.rows[rank][0]);
    blocks.push_back({byte_at(own, offset), count});
    offset += count * size_of(dtype);
  }
  return blocks;
}

// Each host's piece of `packed` (on the leader of the root's host) to or from that host's `own`.
void HierarchicalCommunicator::exchange_pieces(const at::Tensor& packed, const at::Tensor& own,
                                               const Rooted& rooted, int root, bool to_root,
                                               Deadline deadline) {
  std::vector<Links::Transfer> pieces;
  if (is_local(root)) {
    for (int h = 0; h < hosts(); ++h) {
      void* const piece = byte_at(packed, rooted.begin[static_cast<std::size_t>(h)]);
      if (h != host_) {
        pieces.push_back({h, piece, rooted.size_of_host(h)});
      } else if (to_root) {
        copy_bytes(piece, own.data_ptr(), own.nbytes());
      } else {
        copy_bytes(own.data_ptr(), piece, own.nbytes());
      }
    }
  } else {
    pieces.push_back({host_of(root), own.data_ptr(), own.nbytes()});
  }
  const bool receives = is_local(root) == to_root;
  if (receives) {
    transfer({}, pieces, deadline);
  } else {
    transfer(pieces, {}, deadline);
  }
}

void HierarchicalCommunicator::scatter(const shm::ConstBlock* in, shm::Block out, DType dtype,
                                       int root, Deadline deadline) {
  Call call;
  call.op = Op::scatter;
  call.dtype = dtype;
  call.root = root;
  collective(
      call, deadline, [&] { check_rank("root", root); },
      [&] {
        Counts at_root;
        for (int rank = 0; seat_.rank == root && rank < size(); ++rank) {
          at_root.push_back(static_cast<std::int64_t>(in[rank].count));
        }
        const Rooted rooted = agree_with_root(out.count, at_root, root, dtype, deadline);
        const at::Tensor packed = bytes(is_local(root) ? rooted.total : 0);
        std::size_t offset = 0;
        for (const int rank : host_order()) {
          if (seat_.rank != root) break;
          copy_bytes(byte_at(packed, offset), in[rank].data, in[rank].count * size_of(dtype));
          offset += in[rank].count * size_of(dtype);
        }
        if (is_local(root)) hand_up(packed.data_ptr(), rooted.total, root, deadline);
        const at::Tensor own = bytes(is_leader() ? rooted.size_of_host(host_) : 0);
        if (is_leader()) exchange_pieces(packed, own, rooted, root, false, deadline);
        std::vector<shm::ConstBlock> blocks;
        for (const shm::Block& block : blocks_of_host(own, rooted, dtype)) {
          blocks.push_back({block.data, block.count});
        }
        local_->scatter(blocks.data(), out, dtype, 0, deadline);
      });
}

void HierarchicalCommunicator::gather(shm::ConstBlock in, const shm::Block* out, DType dtype,
                                      int root, Deadline deadline) {
  Call call;
  call.op = Op::gather;
  call.dtype = dtype;
  call.root = root;
  collective(
      call, deadline, [&] { check_rank("root", root); },
      [&] {
        Counts at_root;
        for (int rank = 0; seat_.rank == root && rank < size(); ++rank) {
          at_root.push_back(static_cast<std::int64_t>(out[rank].count));
        }
        const Rooted rooted = agree_with_root(in.count, at_root, root, dtype, deadline);
        const at::Tensor own = bytes(is_leader() ? rooted.size_of_host(host_) : 0);
        local_->gather(in, blocks_of_host(own, rooted, dtype).data(), dtype, 0, deadline);
        const at::Tensor packed = bytes(is_local(root) ? rooted.total : 0);
        if (is_leader()) exchange_pieces(packed, own, rooted, root, true, deadline);
        if (is_local(root)) hand_down(packed.data_ptr(), rooted.total, root, deadline);
        std::size_t offset = 0;
        for (const int rank : host_order()) {
          if (seat_.rank != root) break;
          copy_bytes(out[rank].data, byte_at(packed, offset), out[rank].count * size_of(dtype));
          offset += out[rank].count * size_of(dtype);
        }
      });
}

// All ranks as blocks are packed: host by host.
std::vector<int> HierarchicalCommunicator::host_order() const {
  std::vector<int> order;
  for (const auto& ranks : topology_.hosts) order.insert(order.end(), ranks.begin(), ranks.end());
  return order;
}

}  // namespace pyparallel::dist
