#include "shm/point_to_point.h"

#include <algorithm>
#include <cstring>

#include "shm/reduce.h"

namespace pyparallel::shm {
namespace {

constexpr std::uint64_t kMessageMagic = 0x4753454d4c525050;  // "PPRLMESG"
constexpr std::size_t kLine = 64;
// Published at this grain, so that both sides of a long message work at once.
constexpr std::size_t kPieceBytes = std::size_t{64} << 10;

std::size_t padded(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

struct PointToPoint::MessageHeader {
  std::uint64_t magic;
  std::uint64_t count;
  std::int64_t tag;
  std::uint8_t dtype;
  std::uint8_t unused[39];
};

PointToPoint::PointToPoint(std::shared_ptr<Group> group)
    : group_(std::move(group)),
      rank_(group_->rank()),
      size_(group_->size()),
      spin_(group_->crowded()),
      sends_(size_),
      reserved_to_(size_, false) {
  static_assert(sizeof(MessageHeader) == kLine);
  for (int r = 0; r < size_; ++r) incoming_.push_back(std::make_unique<Incoming>());
}

PointToPoint::~PointToPoint() = default;

std::string PointToPoint::describe(const Transfer& transfer) const {
  const std::string peer = transfer.peer_ < 0 ? "any rank" : str("rank ", transfer.peer_);
  return str(transfer.is_send_ ? "send to " : "recv from ", peer, " (tag ", transfer.tag_, ", ",
             transfer.count_, " ", name_of(transfer.dtype_), ") on rank ", rank_, ", ",
             group_text(group_->name(), size_));
}

void PointToPoint::reserve_rings(int to) {
  const Layout& layout = group_->layout();
  if (!reserved_incoming_) {
    group_->reserve(layout.ring(0, rank_), layout.ring_stride() * static_cast<std::size_t>(size_));
    reserved_incoming_ = true;
  }
  if (to >= 0 && !reserved_to_[to]) {
    group_->reserve(layout.ring(rank_, to), layout.ring_stride());
    reserved_to_[to] = true;
  }
}

std::shared_ptr<PointToPoint::Transfer> PointToPoint::start_send(const void* data,
                                                                 std::size_t count, DType dtype,
                                                                 int to, std::int64_t tag) {
  auto transfer = std::make_shared<Transfer>();
  transfer->engine_ = shared_from_this();
  transfer->is_send_ = true;
  transfer->data_ = static_cast<std::byte*>(const_cast<void*>(data));
  transfer->count_ = count;
  transfer->bytes_ = count * size_of(dtype);
  transfer->dtype_ = dtype;
  transfer->peer_ = to;
  transfer->tag_ = tag;
  std::lock_guard lock(mutex_);
  group_->throw_if_unusable();
  group_->page(rank_).core.store(sched_getcpu(), std::memory_order_relaxed);
  if (to != rank_ && group_->page(to).seat.load() == 2)
    group_->check_alive(to, describe(*transfer));
  reserve_rings(to);
  sends_[to].push_back(transfer);
  ++pending_;
  if (sends_[to].size() == 1) guarded([&] { push(to); });
  return transfer;
}

std::shared_ptr<PointToPoint::Transfer> PointToPoint::start_recv(void* data, std::size_t count,
                                                                 DType dtype, int from,
                                                                 std::int64_t tag) {
  auto transfer = std::make_shared<Transfer>();
  transfer->engine_ = shared_from_this();
  transfer->data_ = static_cast<std::byte*>(data);
  transfer->count_ = count;
  transfer->bytes_ = count * size_of(dtype);
  transfer->dtype_ = dtype;
  transfer->peer_ = from;
  transfer->tag_ = tag;
  std::lock_guard lock(mutex_);
  group_->throw_if_unusable();
  group_->page(rank_).core.store(sched_getcpu(), std::memory_order_relaxed);
  reserve_rings(-1);
  ++pending_;
  guarded([&] {
    if (match_unexpected(*transfer)) {
      if (!transfer->done()) incoming_[transfer->source_]->unexpected.back().claimed = transfer;
      return;
    }
    receives_.push_back(transfer);
    for (int r = 0; r < size_; ++r)
      if (from == r || from < 0) pull(r, false);
  });
  return transfer;
}

void PointToPoint::finish(Transfer& transfer) {
  --pending_;
  transfer.done_.store(true, std::memory_order_release);
  // Another thread of this process may sleep for it.
  group_->page(rank_).bell.ring();
}

// Whether the transfer's shape is the message's; ends the transfer where it is not.
static std::string shape_misfit(std::size_t sent, DType sent_type, std::size_t wanted,
                                DType wanted_type) {
  if (sent == wanted && sent_type == wanted_type) return "";
  return str(": the message has ", sent, " ", name_of(sent_type), " elements, ", wanted, " ",
             name_of(wanted_type), " were asked for; the message is dropped");
}

bool PointToPoint::match_unexpected(Transfer& transfer) {
  for (int r = 0; r < size_; ++r) {
    if (transfer.peer_ >= 0 && transfer.peer_ != r) continue;
    auto& queue = incoming_[r]->unexpected;
    for (auto it = queue.begin(); it != queue.end(); ++it) {
      if (it->tag != transfer.tag_ || it->claimed != nullptr) continue;
      transfer.source_ = r;
      if (!it->complete) return true;  // the one that is arriving is the last of the queue
      hand_over(*it, transfer);
      queue.erase(it);
      return true;
    }
  }
  return false;
}

void PointToPoint::hand_over(const Incoming::Unexpected& message, Transfer& transfer) {
  const std::string misfit =
      shape_misfit(message.count, message.dtype, transfer.count_, transfer.dtype_);
  if (!misfit.empty()) {
    transfer.status_ = Status::mismatch;
    transfer.error_ = describe(transfer) + misfit;
  } else if (message.count > 0) {
    std::memcpy(transfer.data_, message.data.get(), message.count * size_of(message.dtype));
  }
  finish(transfer);
}

void PointToPoint::finish_unexpected(int from) {
  auto& queue = incoming_[from]->unexpected;
  queue.back().complete = true;
  if (queue.back().claimed == nullptr) return;
  hand_over(queue.back(), *queue.back().claimed);
  queue.pop_back();
}

bool PointToPoint::push(int to) {
  auto& queue = sends_[to];
  RingPage& ring = group_->ring(rank_, to);
  std::byte* data = reinterpret_cast<std::byte*>(&ring) + sizeof(RingPage);
  const std::size_t capacity = group_->layout().ring_bytes();
  std::uint64_t written = ring.written.value.load(std::memory_order_relaxed);
  const std::uint64_t published = written;
  std::uint64_t last = written;
  std::vector<std::shared_ptr<Transfer>> finished;
  while (!queue.empty()) {
    Transfer& send = *queue.front();
    std::size_t space = capacity - (written - ring.read.load());
    if (space < kLine) break;
    if (!send.header_sent_) {
      const MessageHeader header{
          kMessageMagic, send.count_, send.tag_, static_cast<std::uint8_t>(send.dtype_), {}};
      std::memcpy(data + written % capacity, &header, sizeof header);
      written += kLine;
      space -= kLine;
      send.header_sent_ = true;
    }
    while (send.moved_ < send.bytes_ && space > 0) {
      const std::size_t at = written % capacity;
      const std::size_t n =
          std::min({send.bytes_ - send.moved_, space, kPieceBytes, capacity - at});
      to_peers_.copy(data + at, send.data_ + send.moved_, n);
      send.moved_ += n;
      written += padded(n);  // only a message's last piece is not a multiple already
      space -= std::min(space, padded(n));
      if (written - last >= kPieceBytes) {
        ring.written.publish(written);
        group_->page(to).bell.ring();
        last = written;
      }
    }
    if (send.moved_ < send.bytes_) break;
    finished.push_back(std::move(queue.front()));
    queue.pop_front();
  }
  if (written != last) {
    ring.written.publish(written);
    group_->page(to).bell.ring();
  }
  for (const auto& send : finished) finish(*send);
  return written != published;
}

// Reads the next message's header when there is one that may be taken. True when one is arriving.
bool PointToPoint::take_header(int from, bool drain) {
  Incoming& incoming = *incoming_[from];
  RingPage& ring = group_->ring(from, rank_);
  if (ring.written.load() - incoming.read < kLine) return false;
  MessageHeader header;
  const std::byte* data = reinterpret_cast<const std::byte*>(&ring) + sizeof(RingPage);
  std::memcpy(&header, data + incoming.read % group_->layout().ring_bytes(), sizeof header);
  const DType dtype = static_cast<DType>(header.dtype);
  if (header.magic != kMessageMagic || dtype >= DType::count_ ||
      header.count > (std::uint64_t{1} << 56)) {
    group_->fail(Status::internal,
                 str("recv on rank ", rank_, ", ", group_text(group_->name(), size_), ": rank ",
                     from, " sent a damaged message header"));
    group_->throw_if_unusable();
  }
  const auto wanted = std::find_if(receives_.begin(), receives_.end(), [&](const auto& receive) {
    return (receive->peer_ == from || receive->peer_ < 0) && receive->tag_ == header.tag;
  });
  // A receive that waits for a later message of this source: the earlier ones must make room.
  const bool one_behind = std::any_of(receives_.begin(), receives_.end(), [&](const auto& receive) {
    return receive->peer_ == from || receive->peer_ < 0;
  });
  if (wanted == receives_.end() && !drain && !one_behind) return false;
  std::unique_ptr<std::byte[]> aside;
  if (wanted == receives_.end()) {
    const std::size_t bytes = header.count * size_of(dtype);
    aside.reset(new (std::nothrow) std::byte[bytes]);  // not cleared: the message will fill it
    if (aside == nullptr) {
      group_->fail(
          Status::no_memory,
          str("recv on rank ", rank_, ", ", group_text(group_->name(), size_), ": a message of ",
              bytes, " bytes (", header.count, " ", name_of(dtype), ", tag ", header.tag,
              ") from rank ", from, " came before it was asked for, and there is no ",
              "memory to keep it in; post its receive before those of later messages"));
      group_->throw_if_unusable();
    }
  }
  incoming.arriving = true;
  incoming.bytes = header.count * size_of(dtype);
  incoming.moved = 0;
  incoming.target = nullptr;
  incoming.receive = nullptr;
  incoming.read += kLine;
  if (wanted == receives_.end()) {
    incoming.unexpected.push_back(
        {header.tag, header.count, dtype, std::move(aside), false, nullptr});
    incoming.target = incoming.unexpected.back().data.get();
    return true;
  }
  incoming.receive = *wanted;
  receives_.erase(wanted);
  Transfer& receive = *incoming.receive;
  receive.source_ = from;
  const std::string misfit = shape_misfit(header.count, dtype, receive.count_, receive.dtype_);
  if (misfit.empty()) {
    incoming.target = receive.data_;
  } else {
    receive.status_ = Status::mismatch;
    receive.error_ = describe(receive) + misfit;
  }
  return true;
}

bool PointToPoint::pull(int from, bool drain) {
  Incoming& incoming = *incoming_[from];
  RingPage& ring = group_->ring(from, rank_);
  const std::byte* data = reinterpret_cast<const std::byte*>(&ring) + sizeof(RingPage);
  const std::size_t capacity = group_->layout().ring_bytes();
  bool moved = false;
  while (incoming.arriving || take_header(from, drain)) {
    moved = true;
    const std::size_t there = ring.written.load() - incoming.read;
    const std::size_t at = incoming.read % capacity;
    const std::size_t n =
        std::min({incoming.bytes - incoming.moved, there, kPieceBytes, capacity - at});
    if (n == 0 && incoming.moved < incoming.bytes) {
      ring.read.publish(incoming.read);
      group_->page(from).bell.ring();
      return moved;
    }
    if (incoming.target != nullptr)
      copy(incoming.target + incoming.moved, data + at, n, Store::cached);
    incoming.moved += n;
    incoming.read += padded(n);
    if (incoming.moved == incoming.bytes || n == kPieceBytes) {
      ring.read.publish(incoming.read);
      group_->page(from).bell.ring();
    }
    if (incoming.moved < incoming.bytes) continue;
    incoming.arriving = false;
    if (const auto receive = std::move(incoming.receive)) {
      incoming.receive = nullptr;
      finish(*receive);
    } else {
      finish_unexpected(from);
    }
  }
  return moved;
}

bool PointToPoint::progress() {
  bool moved = false;
  bool stuck = false;
  for (int r = 0; r < size_; ++r) {
    if (sends_[r].empty()) continue;
    moved = push(r) || moved;
    stuck = stuck || !sends_[r].empty();
  }
  if (!reserved_incoming_) return moved;
  for (int r = 0; r < size_; ++r) {
    const bool asked = incoming_[r]->arriving || !receives_.empty();
    if (asked || stuck) moved = pull(r, stuck) || moved;
  }
  return moved;
}

}  // namespace pyparallel::shm
