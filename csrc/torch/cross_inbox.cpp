// Receives from any source: see the protocol at the head of cross_messages.h.
#include "base/error.h"
#include "base/thread.h"
#include "torch/cross_header.h"
#include "torch/links.h"

namespace pyparallel::dist {

bool CrossMessages::has_inbox(std::int64_t tag) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return inboxes_.count(tag) != 0;
}

std::shared_ptr<shm::Work> CrossMessages::receive_any(void* data, std::size_t count, DType dtype,
                                                      std::int64_t tag,
                                                      std::chrono::milliseconds timeout,
                                                      std::shared_ptr<shm::Work> local,
                                                      std::vector<int> ranks) {
  const auto receipt = std::make_shared<Receipt>();
  receipt->data = data;
  receipt->count = count;
  receipt->dtype = dtype;
  receipt->what = str("receive from any rank (tag ", tag, ", group ", group_, ", several hosts)");
  receipt->local = std::move(local);
  auto work = std::make_shared<CallWork>(receipt->what);
  const Deadline deadline = Deadline::after(timeout);
  put_in_inbox(receipt, tag);
  end_on_thread(work, [this, receipt, tag, deadline, ranks = std::move(ranks)] {
    const int source = take_from_inbox(receipt, tag, deadline);
    return receipt->from_this_host ? ranks.at(static_cast<std::size_t>(source)) : source;
  });
  return work;
}

void CrossMessages::put_in_inbox(const std::shared_ptr<Receipt>& receipt, std::int64_t tag) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Inbox& inbox = inboxes_[tag];
    inbox.waiting.push_back(receipt);
    match(inbox);
    if (inbox.waiting.empty() || inbox.listening) return;
    inbox.listening = true;
  }
  try {
    listen(tag);
  } catch (...) {  // nothing may come into the caller's array any more
    const std::lock_guard<std::mutex> lock(mutex_);
    Inbox& inbox = inboxes_[tag];
    inbox.listening = false;
    inbox.waiting.remove(receipt);
    if (receipt->local) receipt->local->cancel();
    throw;
  }
}

// With mutex_ held. Each header goes to the first receive that it suits.
void CrossMessages::match(Inbox& inbox) {
  for (auto receipt = inbox.waiting.begin(); receipt != inbox.waiting.end();) {
    Receipt& one = **receipt;
    auto header = inbox.headers.begin();
    while (header != inbox.headers.end() && one.source >= 0 && one.source != header->source)
      ++header;
    if (header == inbox.headers.end()) {
      ++receipt;
      continue;
    }
    // Where the message from this host has begun to come, the header is for another receive.
    one.from_this_host = one.local != nullptr && !one.local->cancel();
    if (!one.from_this_host) {
      one.announced = *header;
      inbox.headers.erase(header);
    }
    receipt = inbox.waiting.erase(receipt);
  }
  matched_.notify_all();
}

int CrossMessages::take_from_inbox(const std::shared_ptr<Receipt>& receipt, std::int64_t tag,
                                   Deadline deadline) {
  // A message from this host rings no bell here.
  const std::chrono::milliseconds glance(receipt->local ? 1 : 50);
  {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!receipt->announced && !receipt->from_this_host) {
      const bool lost = !gloo_;
      if (receipt->local && receipt->local->done()) {
        receipt->from_this_host = true;
      } else if (lost || deadline.expired()) {
        if (receipt->local) receipt->from_this_host = !receipt->local->cancel();
      } else {
        matched_.wait_for(lock, std::min<Deadline::Duration>(glance, deadline.remaining()));
        continue;
      }
      inboxes_[tag].waiting.remove(receipt);
      if (receipt->from_this_host) break;
      if (lost) throw Aborted(str(receipt->what, ": ended, the group was aborted or closed"));
      throw Timeout(str(receipt->what, ": nothing came within ", deadline.timeout_seconds(), " s"));
    }
  }
  if (receipt->from_this_host) {
    receipt->local->wait(deadline);
    return receipt->local->source();
  }
  receipt->source = receipt->announced->source;
  take(*receipt, receipt->announced->header, deadline);
  return receipt->source;
}

// One header is awaited at a time, while a receive waits for one. gloo takes no receive back, so
// this wait has no end of its own: the receives have deadlines, and abort() ends it.
void CrossMessages::listen(std::int64_t tag) {
  const std::string what = str("header of a message with tag ", tag, " from any rank");
  start_thread(
      str("group ", group_, ": the thread that awaits messages with tag ", tag),
      [self = shared_from_this(), tag, what] {
        for (bool wanted = true; wanted;) {
          Announced next;
          auto landing = bytes_at(&next.header, sizeof(Header));
          const GlooWork coming = self->gloo()->recvAnysource(landing, static_cast<int>(tag));
          self->wait(coming, Deadline::after(std::chrono::hours(24 * 365)), what);
          next.source = coming->sourceRank();
          const std::lock_guard<std::mutex> lock(self->mutex_);
          Inbox& inbox = self->inboxes_[tag];
          inbox.headers.push_back(next);
          self->match(inbox);
          wanted = inbox.listening = !inbox.waiting.empty();
        }
      },
      [self = shared_from_this()](const std::exception_ptr& thrown) noexcept {
        const Cause cause = cause_of(thrown);
        // Closed or aborted: whoever waits hears of it from there.
        if (cause.status == Status::closed || cause.status == Status::aborted) return;
        self->failed_(Error(cause.status, cause.text));
      });
}

}  // namespace pyparallel::dist
