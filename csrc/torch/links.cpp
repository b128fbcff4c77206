#include "torch/links.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "base/interrupt.h"

namespace pyparallel::dist {
namespace {

constexpr int tag = 0;  // transfers of a pair of hosts keep their order
constexpr std::chrono::milliseconds glance(50);

}  // namespace

std::vector<at::Tensor> bytes_at(void* data, std::size_t bytes) {
  return {at::from_blob(data, {static_cast<std::int64_t>(bytes)}, at::kByte)};
}

Links::Links(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<std::string> names,
             std::function<std::string()> trouble)
    : gloo_(std::move(gloo)),
      names_(std::move(names)),
      trouble_(std::move(trouble)),
      host_(gloo_->getRank()),
      waiter_("transfers between hosts") {}

Links::~Links() { abort(); }

void Links::abort() noexcept {
  aborted_ = true;
  const std::lock_guard<std::mutex> lock(gloo_mutex_);
  gloo_.reset();
}

void Links::transfer(const std::string& what, const std::vector<Transfer>& sends,
                     const std::vector<Transfer>& receives, Deadline deadline) {
  c10::intrusive_ptr<c10d::Backend> gloo;
  {
    const std::lock_guard<std::mutex> lock(gloo_mutex_);
    gloo = gloo_;
  }
  if (!gloo) throw Aborted(str(what, ": the links between hosts are closed"));
  Pending pending;
  int host = -1;
  try {
    for (const Transfer& receive : receives) {
      if (receive.bytes == 0) continue;
      auto bytes = bytes_at(receive.data, receive.bytes);
      host = receive.host;
      pending.emplace_back(host, gloo->recv(bytes, host, tag));
    }
    for (const Transfer& send : sends) {
      if (send.bytes == 0) continue;
      auto bytes = bytes_at(send.data, send.bytes);
      host = send.host;
      pending.emplace_back(host, gloo->send(bytes, host, tag));
    }
  } catch (const std::exception& error) {
    for (const auto& [peer, work] : pending) work->abort();
    throw PeerLost(str(what, ": ", names_[static_cast<std::size_t>(host)],
                       " cannot be reached (gloo: ", error.what(), ")"));
  }
  wait(what, pending, deadline);
}

// gloo's own wait can neither be polled nor woken by what happens on this host: another thread
// waits.
void Links::wait(const std::string& what, const Pending& pending, Deadline deadline) {
  const auto at = std::make_shared<std::atomic<int>>(-1);
  const auto done = waiter_.add([pending, at, deadline] {
    for (const auto& [host, work] : pending) {
      *at = host;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.remaining());
      work->wait(std::max(left, std::chrono::milliseconds(1)));
    }
  });
  std::string reason;
  bool interrupted = false;
  while (!done->wait_for(glance)) {
    if (!reason.empty()) continue;  // aborted: gloo lets go of the memory, then we may leave
    reason = aborted_ ? "aborted" : trouble_();
    if (reason.empty() && interrupt_requested()) {
      interrupted = true;
      reason = "a signal ended the wait";
    }
    if (reason.empty()) continue;
    for (const auto& [host, work] : pending) work->abort();
  }
  if (interrupted) throw Interrupted(str(what, ": ", reason));
  if (!reason.empty()) throw Aborted(str(what, ": ", reason));
  try {
    done->rethrow();
  } catch (const std::exception& error) {
    const std::string& peer = names_[static_cast<std::size_t>(std::max(0, at->load()))];
    const std::string text = std::string(error.what()).substr(0, 300);
    if (deadline.remaining() < std::chrono::milliseconds(2)) {
      throw Timeout(str(what, ": ", peer, " did not answer within ", deadline.timeout_seconds(),
                        " s; the link may be down, or a rank there late (gloo: ", text, ")"));
    }
    throw PeerLost(str(what, ": the connection to ", peer,
                       " broke; a process there may have ended ", "(gloo: ", text, ")"));
  }
}

}  // namespace pyparallel::dist
