// All-to-all between ranks of several hosts.
#include "torch/hierarchical.h"
#include "torch/packing.h"

namespace pyparallel::dist {

// Rows of the counts: what a rank sends to each rank, then what it receives from each.
std::string HierarchicalCommunicator::check_exchange(const std::vector<Counts>& rows) const {
  const auto n = static_cast<std::size_t>(size());
  for (std::size_t from = 0; from < rows.size(); ++from) {
    for (std::size_t to = 0; to < n; ++to) {
      if (rows[from][to] == rows[to][n + from]) continue;
      return pyparallel::str("rank ", from, " sends ", rows[from][to], " elements to rank ", to,
                             ", which expects ", rows[to][n + from]);
    }
  }
  return {};
}

void HierarchicalCommunicator::all_to_all(const shm::ConstBlock* in, const shm::Block* out,
                                          DType dtype, Deadline deadline) {
  Call call;
  call.op = Op::all_to_all;
  call.dtype = dtype;
  collective(
      call, deadline, [] {},
      [&] {
        Counts mine;
        for (int rank = 0; rank < size(); ++rank)
          mine.push_back(static_cast<std::int64_t>(in[rank].count));
        for (int rank = 0; rank < size(); ++rank)
          mine.push_back(static_cast<std::int64_t>(out[rank].count));
        const std::vector<Counts> rows = exchange_counts(mine, deadline);
        share_finding(check_exchange(rows), deadline);
        exchange_on_host(in, out, dtype, deadline);
        exchange_between_hosts(in, out, dtype, rows, deadline);
      });
}

void HierarchicalCommunicator::exchange_on_host(const shm::ConstBlock* in, const shm::Block* out,
                                                DType dtype, Deadline deadline) {
  std::vector<shm::ConstBlock> from;
  std::vector<shm::Block> to;
  for (const int rank : local_ranks()) {
    from.push_back(in[rank]);
    to.push_back(out[rank]);
  }
  local_->all_to_all(from.data(), to.data(), dtype, deadline);
}

// Up: each rank's blocks for other hosts, packed. Across: from the leader of host g to that of h,
// for each rank of g the blocks of the ranks of h. Down: each rank's blocks from other hosts,
// packed.
void HierarchicalCommunicator::exchange_between_hosts(const shm::ConstBlock* in,
                                                      const shm::Block* out, DType dtype,
                                                      const std::vector<Counts>& rows,
                                                      Deadline deadline) {
  const std::size_t item = size_of(dtype);
  const auto bytes_between = [&](int from, int to) {
    return static_cast<std::size_t>(
               rows[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)]) *
           item;
  };
  const auto other_ranks = [&] {
    std::vector<int> ranks;
    for (int h = 0; h < hosts(); ++h) {
      if (h != host_) ranks.insert(ranks.end(), ranks_of(h).begin(), ranks_of(h).end());
    }
    return ranks;
  }();

  std::size_t up_size = 0;
  std::size_t down_size = 0;
  for (const int rank : other_ranks) {
    up_size += in[rank].count * item;
    down_size += out[rank].count * item;
  }
  const at::Tensor up = bytes(up_size);
  const at::Tensor down = bytes(down_size);
  std::size_t offset = 0;
  for (const int rank : other_ranks) {
    copy_bytes(byte_at(up, offset), in[rank].data, in[rank].count * item);
    offset += in[rank].count * item;
  }

  std::vector<at::Tensor> ups;    // leader: one per rank of this host
  std::vector<at::Tensor> downs;  // likewise
  std::vector<shm::Block> up_blocks;
  std::vector<shm::ConstBlock> down_blocks;
  for (std::size_t i = 0; is_leader() && i < local_ranks().size(); ++i) {
    std::size_t sent = 0;
    std::size_t received = 0;
    for (const int rank : other_ranks) {
      sent += bytes_between(local_ranks()[i], rank);
      received += bytes_between(rank, local_ranks()[i]);
    }
    ups.push_back(bytes(sent));
    downs.push_back(bytes(received));
    up_blocks.push_back({ups.back().data_ptr(), sent});
    down_blocks.push_back({downs.back().data_ptr(), received});
  }
  local_->gather({up.data_ptr(), up_size}, up_blocks.data(), DType::u8, 0, deadline);
  if (is_leader()) cross(ups, downs, bytes_between, deadline);
  local_->scatter(down_blocks.data(), {down.data_ptr(), down_size}, DType::u8, 0, deadline);

  offset = 0;
  for (const int rank : other_ranks) {
    copy_bytes(out[rank].data, byte_at(down, offset), out[rank].count * item);
    offset += out[rank].count * item;
  }
}

void HierarchicalCommunicator::cross(const std::vector<at::Tensor>& ups,
                                     const std::vector<at::Tensor>& downs,
                                     const std::function<std::size_t(int, int)>& bytes_between,
                                     Deadline deadline) {
  const std::size_t ranks = local_ranks().size();
  std::vector<std::size_t> read(ranks, 0);
  std::vector<at::Tensor> outgoing;
  std::vector<at::Tensor> incoming;
  std::vector<Links::Transfer> sends;
  std::vector<Links::Transfer> receives;
  for (int h = 0; h < hosts(); ++h) {
    if (h == host_) continue;
    std::size_t sent = 0;
    std::size_t received = 0;
    for (const int mine : local_ranks()) {
      for (const int theirs : ranks_of(h)) {
        sent += bytes_between(mine, theirs);
        received += bytes_between(theirs, mine);
      }
    }
    outgoing.push_back(bytes(sent));
    incoming.push_back(bytes(received));
    std::size_t offset = 0;
    for (std::size_t i = 0; i < ranks; ++i) {
      std::size_t size = 0;
      for (const int theirs : ranks_of(h)) size += bytes_between(local_ranks()[i], theirs);
      copy_bytes(byte_at(outgoing.back(), offset), byte_at(ups[i], read[i]), size);
      read[i] += size;
      offset += size;
    }
    sends.push_back({h, outgoing.back().data_ptr(), sent});
    receives.push_back({h, incoming.back().data_ptr(), received});
  }
  transfer(sends, receives, deadline);
  std::vector<std::size_t> written(ranks, 0);
  std::size_t message = 0;
  for (int h = 0; h < hosts(); ++h) {
    if (h == host_) continue;
    std::size_t offset = 0;
    for (const int theirs : ranks_of(h)) {
      for (std::size_t i = 0; i < ranks; ++i) {
        const std::size_t size = bytes_between(theirs, local_ranks()[i]);
        copy_bytes(byte_at(downs[i], written[i]), byte_at(incoming[message], offset), size);
        written[i] += size;
        offset += size;
      }
    }
    ++message;
  }
}

}  // namespace pyparallel::dist
