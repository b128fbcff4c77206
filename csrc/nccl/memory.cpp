#include "nccl/memory.h"

#include <utility>

#include "nccl/background.h"
#include "nccl/group.h"
#include "nccl/scalar.h"

namespace pyparallel::nccl {

Memory::Memory(std::shared_ptr<const Library> library, std::size_t bytes)
    : library_(std::move(library)) {
  PYPARALLEL_NCCL_NEED(*library_, MemAlloc);
  PYPARALLEL_NCCL_NEED(*library_, MemFree);
  PYPARALLEL_REQUIRE(bytes > 0, "ncclMemAlloc of 0 bytes");
  check(*library_, (*library_)->MemAlloc(&data_, bytes), str("ncclMemAlloc(", bytes, " bytes)"));
  if (data_ == nullptr) {
    throw Unsupported(str("ncclMemAlloc(", bytes, " bytes) reports success but gives no memory; ",
                          library_->describe()));
  }
  bytes_ = bytes;
}

void Memory::free() {
  void* data = std::exchange(data_, nullptr);
  bytes_ = 0;
  if (data != nullptr) check(*library_, (*library_)->MemFree(data), "ncclMemFree");
}

Memory::~Memory() {
  if (data_ != nullptr)
    run_detached([library = library_, data = data_] { (*library)->MemFree(data); });
}

// --- ranges of a communicator

std::uintptr_t Communicator::claim(std::map<std::uintptr_t, Range>& ranges, void* data,
                                   std::size_t bytes, const char* what) {
  require_usable();
  PYPARALLEL_REQUIRE(data != nullptr && bytes > 0, where(), ": ", what, " of ", bytes, " bytes at ",
                     data, ": there is nothing to register");
  PYPARALLEL_REQUIRE(!Group::active(), where(), ": ", what,
                     " inside a group: leave the group first");
  const auto first = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard<std::mutex> lock(state_);
  auto next = ranges.upper_bound(first);
  const auto overlap = [&](const std::pair<const std::uintptr_t, Range>& range) {
    PYPARALLEL_REQUIRE(range.first >= first + bytes || first >= range.first + range.second.bytes,
                       where(), ": ", what, " of ", bytes, " bytes at ", data, " overlaps ",
                       range.second.bytes, " bytes at ", reinterpret_cast<void*>(range.first),
                       " that are registered; close that registration first, or use it");
  };
  if (next != ranges.end()) overlap(*next);
  if (next != ranges.begin()) overlap(*std::prev(next));
  ranges[first] = {bytes, nullptr};  // taken, so that no other thread claims it meanwhile
  return first;
}

void Communicator::unclaim(std::map<std::uintptr_t, Range>& ranges, std::uintptr_t first,
                           bool wait) {
  std::function<Result(RawComm)> release;
  {
    const std::lock_guard<std::mutex> lock(state_);
    const auto found = ranges.find(first);
    if (found == ranges.end()) return;
    release = std::move(found->second.release);
    ranges.erase(found);
    if (release == nullptr || handle_ == nullptr) return;
    if (!wait) {
      pending_.push_back(std::move(release));
      return;
    }
  }
  const auto lock = enter("deregistering", deadline());
  const RawComm handle = this->handle();
  finish(release(handle), handle, "deregistering", deadline());
}

Registration::Registration(const std::shared_ptr<Communicator>& communicator, void* data,
                           std::size_t bytes)
    : communicator_(communicator) {
  Communicator& c = *communicator;
  PYPARALLEL_NCCL_NEED(c.library(), CommRegister);
  PYPARALLEL_NCCL_NEED(c.library(), CommDeregister);
  const std::string text = str("ncclCommRegister(", data, ", ", bytes, " bytes)");
  first_ = c.claim(c.registered_, data, bytes, "ncclCommRegister");
  try {
    const auto lock = c.enter(text, c.deadline());
    const RawComm comm = c.handle();
    void* handle = nullptr;
    c.finish(c.library()->CommRegister(comm, data, bytes, &handle), comm, text, c.deadline());
    const std::lock_guard<std::mutex> state(c.state_);
    c.registered_[first_].release = [library = c.library_handle(), handle](RawComm owner) {
      return (*library)->CommDeregister(owner, handle);
    };
  } catch (...) {
    c.unclaim(c.registered_, first_, false);
    throw;
  }
}

Registration::~Registration() {
  if (const auto c = communicator_.lock()) c->unclaim(c->registered_, first_, false);
}

void Registration::close() {
  if (const auto c = std::exchange(communicator_, {}).lock())
    c->unclaim(c->registered_, first_, true);
}

bool Registration::open() const {
  const auto c = communicator_.lock();
  return c != nullptr && c->claimed(c->registered_, first_);
}

Window::Window(const std::shared_ptr<Communicator>& communicator, void* data, std::size_t bytes,
               int flags)
    : communicator_(communicator), bytes_(bytes) {
  Communicator& c = *communicator;
  PYPARALLEL_NCCL_NEED(c.library(), CommWindowRegister);
  PYPARALLEL_NCCL_NEED(c.library(), CommWindowDeregister);
  PYPARALLEL_REQUIRE(reinterpret_cast<std::uintptr_t>(data) % window_alignment == 0, c.where(),
                     ": a window starts on ", window_alignment, " bytes, got ", data,
                     "; memory from ncclMemAlloc does");
  const std::string text = str("ncclCommWindowRegister(", data, ", ", bytes, " bytes)");
  first_ = c.claim(c.windows_, data, bytes, "ncclCommWindowRegister");
  try {
    const auto lock = c.enter(text, c.deadline());
    const RawComm comm = c.handle();
    // On the heap: a non-blocking library writes it when it is done, which may be after we gave up.
    auto made = std::make_unique<RawWindow>(nullptr);
    const Result result = c.library()->CommWindowRegister(comm, data, bytes, made.get(), flags);
    try {
      c.finish(result, comm, text, c.deadline());
    } catch (...) {
      if (result == Result::in_progress) static_cast<void>(made.release());
      throw;
    }
    handle_ = *made;
    if (handle_ == nullptr) {
      throw Unsupported(str(c.where(), ": ", text,
                            " reports success but makes no window: this library ",
                            "or this memory has no symmetric windows (the memory must come from ",
                            "ncclMemAlloc on every rank); ", c.library().describe()));
    }
    const std::lock_guard<std::mutex> state(c.state_);
    c.windows_[first_].release = [library = c.library_handle(), window = handle_](RawComm owner) {
      return (*library)->CommWindowDeregister(owner, window);
    };
  } catch (...) {
    c.unclaim(c.windows_, first_, false);
    throw;
  }
}

Window::~Window() {
  if (const auto c = communicator_.lock()) c->unclaim(c->windows_, first_, false);
}

void Window::close() {
  if (const auto c = std::exchange(communicator_, {}).lock()) c->unclaim(c->windows_, first_, true);
  handle_ = nullptr;
}

bool Window::open() const {
  const auto c = communicator_.lock();
  return c != nullptr && c->claimed(c->windows_, first_);
}

bool Communicator::claimed(const std::map<std::uintptr_t, Range>& ranges,
                           std::uintptr_t first) const {
  const std::lock_guard<std::mutex> lock(state_);
  return ranges.count(first) != 0;
}

// --- reductions of a communicator

std::shared_ptr<PreMulSum> PreMulSum::make(const std::shared_ptr<Communicator>& communicator,
                                           double factor, Element element) {
  Communicator& c = *communicator;
  PYPARALLEL_NCCL_NEED(c.library(), RedOpCreatePreMulSum);
  PYPARALLEL_NCCL_NEED(c.library(), RedOpDestroy);
  Scalar scalar = Scalar::of(factor, element);
  const auto lock = c.enter("ncclRedOpCreatePreMulSum", c.deadline());
  const RawComm comm = c.handle();
  std::shared_ptr<PreMulSum> made(new PreMulSum);
  c.finish(c.library()->RedOpCreatePreMulSum(&made->op_, scalar.bytes, element.type,
                                             ScalarResidence::host, comm),
           comm, str("ncclRedOpCreatePreMulSum(", factor, ", ", element.name, ")"), c.deadline());
  made->owner_ = communicator;
  made->type_ = element.type;
  return made;
}

PreMulSum::~PreMulSum() {
  const auto owner = owner_.lock();
  if (owner == nullptr) return;
  const std::lock_guard<std::mutex> lock(owner->state_);
  if (owner->handle_ == nullptr) return;
  owner->pending_.push_back([library = owner->library_handle(), op = op_](RawComm comm) {
    return (*library)->RedOpDestroy(op, comm);
  });
}

}  // namespace pyparallel::nccl
