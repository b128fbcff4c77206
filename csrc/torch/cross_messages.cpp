#include "torch/cross_messages.h"

#include <ATen/ATen.h>

#include <thread>
#include <vector>

#include "base/error.h"

namespace pyparallel::dist {

struct CrossMessages::Header {
  static constexpr std::uint32_t expected_magic = 0x31535050;  // "PPS1"
  std::uint32_t magic = expected_magic;
  std::int32_t data_tag = 0;
  std::uint64_t count = 0;
  std::int64_t tag = 0;
  DType dtype = DType::u8;
  std::uint8_t reserved[7] = {};
};

struct CrossMessages::Receipt {
  Header header;
  GlooWork header_work;
  void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::u8;
  int source = 0;
  std::string what;
};

namespace {

std::vector<at::Tensor> bytes_at(void* data, std::size_t bytes) {
  return {at::from_blob(data, {static_cast<std::int64_t>(bytes)}, at::kByte)};
}

}  // namespace

CrossMessages::CrossMessages(c10::intrusive_ptr<c10d::Backend> gloo, std::string group,
                             std::function<void(const Error&)> failed)
    : gloo_(std::move(gloo)), group_(std::move(group)), failed_(std::move(failed)) {}

std::string CrossMessages::describe(const char* verb, int peer, std::int64_t tag) const {
  return str(verb, peer, " (tag ", tag, ", group ", group_, ", another host)");
}

void CrossMessages::check_tag(const char* verb, int peer, std::int64_t tag) const {
  PYPARALLEL_REQUIRE(tag >= 0 && tag < tags, describe(verb, peer, tag),
                     ": tags of messages between hosts are 0 to ", tags - 1);
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

void CrossMessages::end_on_thread(const std::shared_ptr<CallWork>& work, int source,
                                  std::function<void()> end) {
  std::thread([self = shared_from_this(), work, source, end = std::move(end)]() mutable {
    std::exception_ptr thrown;
    try {
      end();
    } catch (const Mismatch&) {
      thrown = std::current_exception();
    } catch (const Error& error) {
      thrown = std::current_exception();
      self->failed_(error);
    } catch (...) {
      thrown = std::current_exception();
    }
    end = nullptr;
    work->finish(thrown, source);
  }).detach();
}

std::shared_ptr<shm::Work> CrossMessages::send(const void* data, std::size_t count, DType dtype,
                                               int destination, std::int64_t tag,
                                               std::chrono::milliseconds timeout) {
  check_tag("send to rank ", destination, tag);
  const std::string what = describe("send to rank ", destination, tag);
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
  end_on_thread(work, -1, [this, header, parts, deadline, what] {
    for (const GlooWork& part : parts) wait(part, deadline, what);
  });
  return work;
}

std::shared_ptr<shm::Work> CrossMessages::receive(void* data, std::size_t count, DType dtype,
                                                  int source, std::int64_t tag,
                                                  std::chrono::milliseconds timeout) {
  check_tag("receive from rank ", source, tag);
  const auto receipt = std::make_shared<Receipt>();
  receipt->data = data;
  receipt->count = count;
  receipt->dtype = dtype;
  receipt->source = source;
  receipt->what = describe("receive from rank ", source, tag);
  auto announced = bytes_at(&receipt->header, sizeof(Header));
  receipt->header_work = gloo()->recv(announced, source, static_cast<int>(tag));
  auto work = std::make_shared<CallWork>(receipt->what);
  const Deadline deadline = Deadline::after(timeout);
  end_on_thread(work, source, [this, receipt, deadline] { take(*receipt, deadline); });
  return work;
}

void CrossMessages::take(Receipt& receipt, Deadline deadline) {
  wait(receipt.header_work, deadline, receipt.what);
  const Header& header = receipt.header;
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
}

}  // namespace pyparallel::dist
