#include "torch/cross_messages.h"

#include <ATen/ATen.h>

#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "torch/cross_header.h"
#include "torch/links.h"

namespace pyparallel::dist {

CrossMessages::CrossMessages(c10::intrusive_ptr<c10d::Backend> gloo, std::string group,
                             std::function<void(const Error&)> failed)
    : gloo_(std::move(gloo)), group_(std::move(group)), failed_(std::move(failed)) {}

CrossMessages::~CrossMessages() = default;

std::string CrossMessages::describe(const char* verb, int peer, std::int64_t tag) const {
  return str(verb, peer, " (tag ", tag, ", group ", group_, ", another host)");
}

void CrossMessages::check_tag(const std::string& what, std::int64_t tag) {
  PYPARALLEL_REQUIRE(tag >= 0 && tag < tags, what, ": tags of messages between hosts are 0 to ",
                     tags - 1);
}

c10::intrusive_ptr<c10d::Backend> CrossMessages::gloo() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!gloo_) throw Closed(str("group ", group_, ": the connections between hosts are closed"));
  return gloo_;
}

void CrossMessages::wait(const GlooWork& work, Deadline deadline, const std::string& what) {
  std::list<GlooWork>::iterator place;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!gloo_) throw Closed(str(what, ": the connections between hosts are closed"));
    place = waiting_.insert(waiting_.end(), work);
  }
  bool done = false;
  std::string text;
  try {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.remaining());
    done = work->wait(std::max(left, std::chrono::milliseconds(1)));
  } catch (const std::exception& error) {
    text = std::string(error.what()).substr(0, 300);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.erase(place);
    if (!gloo_) throw Aborted(str(what, ": ended, the group was aborted or closed"));
  }
  if (!text.empty() && deadline.remaining() < std::chrono::milliseconds(2)) {
    throw Timeout(
        str(what, ": not done after ", deadline.timeout_seconds(), " s (gloo: ", text, ")"));
  }
  if (!text.empty()) throw PeerLost(str(what, ": the connection broke (gloo: ", text, ")"));
  if (!done) throw Aborted(str(what, ": ended early"));
}

void CrossMessages::end_on_thread(const std::shared_ptr<CallWork>& work, std::function<int()> end) {
  start_thread(
      str("group ", group_, ": the thread of a message between hosts"),
      [work, end = std::move(end)]() mutable {
        const int source = end();
        end = nullptr;
        work->finish(nullptr, source);
      },
      [self = shared_from_this(), work](const std::exception_ptr& thrown) noexcept {
        const Cause cause = cause_of(thrown);
        if (cause.status != Status::mismatch) self->failed_(Error(cause.status, cause.text));
        work->finish(thrown);
      });
}

std::shared_ptr<shm::Work> CrossMessages::send(const void* data, std::size_t count, DType dtype,
                                               int destination, std::int64_t tag,
                                               std::chrono::milliseconds timeout) {
  const std::string what = describe("send to rank ", destination, tag);
  check_tag(what, tag);
  const auto header = std::make_shared<Header>();
  header->data_tag = static_cast<std::int32_t>(tags + sent_++ % tags);
  header->count = count;
  header->tag = tag;
  header->dtype = dtype;
  std::vector<GlooWork> parts;
  const auto connections = gloo();
  auto announced = bytes_at(header.get(), sizeof(Header));
  parts.push_back(connections->send(announced, destination, static_cast<int>(tag)));
  if (count > 0) {
    auto bytes = bytes_at(const_cast<void*>(data), count * size_of(dtype));
    parts.push_back(connections->send(bytes, destination, header->data_tag));
  }
  auto work = std::make_shared<CallWork>(what);
  const Deadline deadline = Deadline::after(timeout);
  end_on_thread(work, [this, header, parts, deadline, what] {
    for (const GlooWork& part : parts) wait(part, deadline, what);
    return -1;
  });
  return work;
}

std::shared_ptr<shm::Work> CrossMessages::receive(void* data, std::size_t count, DType dtype,
                                                  int source, std::int64_t tag,
                                                  std::chrono::milliseconds timeout) {
  const auto receipt = std::make_shared<Receipt>();
  receipt->data = data;
  receipt->count = count;
  receipt->dtype = dtype;
  receipt->source = source;
  receipt->what = describe("receive from rank ", source, tag);
  check_tag(receipt->what, tag);
  auto work = std::make_shared<CallWork>(receipt->what);
  const Deadline deadline = Deadline::after(timeout);
  if (has_inbox(tag)) {
    put_in_inbox(receipt, tag);
    end_on_thread(
        work, [this, receipt, tag, deadline] { return take_from_inbox(receipt, tag, deadline); });
    return work;
  }
  const auto header = std::make_shared<Header>();
  auto announced = bytes_at(header.get(), sizeof(Header));
  const GlooWork coming = gloo()->recv(announced, source, static_cast<int>(tag));
  end_on_thread(work, [this, receipt, header, coming, deadline] {
    wait(coming, deadline, receipt->what);
    take(*receipt, *header, deadline);
    return receipt->source;
  });
  return work;
}

void CrossMessages::take(Receipt& receipt, const Header& header, Deadline deadline) {
  if (header.magic != Header::expected_magic || header.dtype >= DType::count_ ||
      header.count > (std::uint64_t{1} << 56) || header.data_tag < tags) {
    throw PeerLost(str(receipt.what,
                       ": what came is no message header; the versions of pyparallel ",
                       "on the two hosts may differ"));
  }
  const bool fits = header.count == receipt.count && header.dtype == receipt.dtype;
  const std::size_t bytes = header.count * size_of(header.dtype);
  const at::Tensor aside =
      fits ? at::Tensor() : at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
  if (bytes > 0) {
    auto landing = bytes_at(fits ? receipt.data : aside.data_ptr(), bytes);
    wait(gloo()->recv(landing, receipt.source, header.data_tag), deadline, receipt.what);
  }
  if (!fits) {
    throw Mismatch(str(receipt.what, ": ", header.count, " x ", name_of(header.dtype),
                       " were sent, ", receipt.count, " x ", name_of(receipt.dtype),
                       " expected; the message is dropped"));
  }
}

void CrossMessages::abort() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  gloo_.reset();
  for (const GlooWork& work : waiting_) work->abort();
  matched_.notify_all();
}

}  // namespace pyparallel::dist
