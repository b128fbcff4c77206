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

void HierarchicalCommunicator::scatter(const shm::ConstBlock* in, shm::Block out, DType dtype,
                                       int root, Deadline deadline) {
  Call call;
  call.op = Op::scatter;
  call.dtype = dtype;
  call.root = root;
  collective(
      call, deadline, [&] { check_rank("root", root); },
      [&] {
        Counts mine{static_cast<std::int64_t>(out.count)};
        for (int rank = 0; rank < size(); ++rank) {
          mine.push_back(seat_.rank == root ? static_cast<std::int64_t>(in[rank].count) : 0);
        }
        const std::vector<Counts> rows = exchange_counts(mine, deadline);
        share_finding(rows.empty() ? "" : check_root_counts(rows, root), deadline);

        const Pieces pieces = pieces_of(seat_.rank == root ? mine : Counts(), rows, root, dtype);
        const at::Tensor packed = bytes(is_local(root) ? pieces.total : 0);
        if (seat_.rank == root) {
          std::size_t offset = 0;
          for (const auto& ranks : topology_.hosts) {
            for (const int rank : ranks) {
              copy_bytes(byte_at(packed, offset), in[rank].data, in[rank].count * size_of(dtype));
              offset += in[rank].count * size_of(dtype);
            }
          }
        }
        at::Tensor own = bytes(is_leader() ? pieces.size_of_host(host_) : 0);
        if (is_local(root)) hand_up(packed.data_ptr(), pieces.total, root, deadline);
        if (is_leader()) {
          std::vector<Links::Transfer> sends;
          std::vector<Links::Transfer> receives;
          if (is_local(root)) {
            for (int h = 0; h < hosts(); ++h) {
              if (h == host_) continue;
              sends.push_back({h, byte_at(packed, pieces.begin[static_cast<std::size_t>(h)]),
                               pieces.size_of_host(h)});
            }
            copy_bytes(own.data_ptr(),
                       byte_at(packed, pieces.begin[static_cast<std::size_t>(host_)]),
                       own.nbytes());
          } else {
            receives.push_back({host_of(root), own.data_ptr(), own.nbytes()});
          }
          transfer(sends, receives, deadline);
        }
        std::vector<shm::ConstBlock> blocks;
        std::size_t offset = 0;
        for (std::size_t i = 0; is_leader() && i < local_ranks().size(); ++i) {
          const auto count =
              static_cast<std::size_t>(rows[static_cast<std::size_t>(local_ranks()[i])][0]);
          blocks.push_back({byte_at(own, offset), count});
          offset += count * size_of(dtype);
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
        Counts mine{static_cast<std::int64_t>(in.count)};
        for (int rank = 0; rank < size(); ++rank) {
          mine.push_back(seat_.rank == root ? static_cast<std::int64_t>(out[rank].count) : 0);
        }
        const std::vector<Counts> rows = exchange_counts(mine, deadline);
        share_finding(rows.empty() ? "" : check_root_counts(rows, root), deadline);

        const Pieces pieces = pieces_of(seat_.rank == root ? mine : Counts(), rows, root, dtype);
        const at::Tensor packed = bytes(is_local(root) ? pieces.total : 0);
        const at::Tensor own = bytes(is_leader() ? pieces.size_of_host(host_) : 0);
        std::vector<shm::Block> blocks;
        std::size_t offset = 0;
        for (std::size_t i = 0; is_leader() && i < local_ranks().size(); ++i) {
          const auto count =
              static_cast<std::size_t>(rows[static_cast<std::size_t>(local_ranks()[i])][0]);
          blocks.push_back({byte_at(own, offset), count});
          offset += count * size_of(dtype);
        }
        local_->gather(in, blocks.data(), dtype, 0, deadline);
        if (is_leader()) {
          std::vector<Links::Transfer> sends;
          std::vector<Links::Transfer> receives;
          if (is_local(root)) {
            for (int h = 0; h < hosts(); ++h) {
              if (h == host_) continue;
              receives.push_back({h, byte_at(packed, pieces.begin[static_cast<std::size_t>(h)]),
                                  pieces.size_of_host(h)});
            }
            copy_bytes(byte_at(packed, pieces.begin[static_cast<std::size_t>(host_)]),
                       own.data_ptr(), own.nbytes());
          } else {
            sends.push_back({host_of(root), own.data_ptr(), own.nbytes()});
          }
          transfer(sends, receives, deadline);
        }
        if (is_local(root)) hand_down(packed.data_ptr(), pieces.total, root, deadline);
        if (seat_.rank != root) return;
        offset = 0;
        for (const auto& ranks : topology_.hosts) {
          for (const int rank : ranks) {
            copy_bytes(out[rank].data, byte_at(packed, offset), out[rank].count * size_of(dtype));
            offset += out[rank].count * size_of(dtype);
          }
        }
      });
}

// From the root's row, which the root has and the leaders get; other ranks have nothing to place.
HierarchicalCommunicator::Pieces HierarchicalCommunicator::pieces_of(
    const Counts& own_row, const std::vector<Counts>& rows, int root, DType dtype) const {
  Pieces pieces;
  const Counts& row = rows.empty() ? own_row : rows[static_cast<std::size_t>(root)];
  for (int h = 0; h < hosts(); ++h) {
    pieces.begin.push_back(pieces.total);
    for (const int rank : ranks_of(h)) {
      if (row.empty()) continue;
      pieces.total +=
          static_cast<std::size_t>(row[1 + static_cast<std::size_t>(rank)]) * size_of(dtype);
    }
  }
  pieces.begin.push_back(pieces.total);
  return pieces;
}

}  // namespace pyparallel::dist
