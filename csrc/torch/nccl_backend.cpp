#include "torch/nccl_backend.h"

#include <cstring>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/error.h"
#include "torch/nccl_work.h"
#include "torch/profiling.h"

namespace pyparallel::dist {
namespace {

const StreamCalls* known_calls = nullptr;

constexpr std::chrono::seconds kAbortTime(5);

Seat under_own_prefix(const Seat& seat) {
  Seat own = seat;
  own.store = c10::make_intrusive<c10d::PrefixStore>("cuda", seat.store);
  return own;
}

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

// Every rank's word under the same key, by rank. `what` is the call that needs them.
std::vector<std::string> exchange_words(const Seat& seat, const std::string& key,
                                        const std::string& mine, const std::string& what,
                                        Deadline deadline) {
  std::vector<std::string> keys, words;
  for (int rank = 0; rank < seat.size; ++rank) keys.push_back(str(key, rank));
  seat.store->set(keys[static_cast<std::size_t>(seat.rank)], bytes_of(mine));
  if (!wait_for_keys(*seat.store, keys, deadline)) {
    std::string absent;
    for (int rank = 0; rank < seat.size; ++rank)
      if (!seat.store->check({keys[static_cast<std::size_t>(rank)]}))
        absent += str(absent.empty() ? "" : ", ", rank);
    throw Timeout(str(what,
                      ": the group's first call on this device needs all ranks; absent after ",
                      deadline.timeout_seconds(), " s: rank ", absent));
  }
  for (const std::string& one : keys) {
    const auto bytes = seat.store->get(one);
    words.emplace_back(bytes.begin(), bytes.end());
  }
  return words;
}

}  // namespace

const StreamCalls* cuda_stream_calls() noexcept { return known_calls; }
void set_cuda_stream_calls(const StreamCalls* calls) noexcept { known_calls = calls; }

NcclBackend::NcclBackend(const Seat& seat, c10::DeviceType type, const StreamCalls& calls)
    : c10d::Backend(seat.rank, seat.size),
      seat_(under_own_prefix(seat)),
      timeout_(seat.timeout),
      streams_(type, calls),
      topology_(meet(seat_, Deadline::after(seat_.timeout))) {}

// Neither waits: the communicator is ended by a background thread.
NcclBackend::~NcclBackend() = default;

std::string NcclBackend::where(const char* name) const {
  return str(name, " #", sequence_, ", group ", seat_.group, ", rank ", seat_.rank);
}

nccl::Communicator& NcclBackend::communicator(c10::Device device, const std::string& what,
                                              std::chrono::milliseconds timeout) {
  if (ends_.ranks) {
    PYPARALLEL_REQUIRE(*device_ == device, "group ", seat_.group, ", rank ", seat_.rank,
                       ": a tensor on ", device.str(), ", but this rank's communicator is on ",
                       device_->str(), ", the device of its first call; a rank has one device");
    ends_.ranks->set_timeout(timeout);
    return *ends_.ranks;
  }
  const c10::DeviceGuard guard(device);
  const Deadline deadline = Deadline::after(timeout);
  const auto library = nccl::Library::process();
  const std::string key = str(topology_.prefix, "nccl_id");
  nccl::UniqueId id{};
  if (seat_.rank == 0) {
    id = nccl::make_unique_id(*library);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&id);
    seat_.store->set(key, std::vector<std::uint8_t>(bytes, bytes + sizeof id));
  }
  exchange_words(seat_, str(topology_.prefix, "first/"), "", what, deadline);
  if (seat_.rank != 0) {
    const auto bytes = seat_.store->get(key);
    PYPARALLEL_REQUIRE(bytes.size() == sizeof id, "group ", seat_.group, ": rank 0 wrote ",
                       bytes.size(), " bytes that are no NCCL id; expected ", sizeof id);
    std::memcpy(&id, bytes.data(), sizeof id);
  }
  Ends made;
  made.roll = std::make_shared<RollCall>(seat_, topology_);
  nccl::Options options;
  options.name = seat_.group;
  options.timeout = timeout;
  options.explain = [roll = made.roll] { return roll->absent(); };
  made.ranks = nccl::Communicator::init(library, {id}, seat_.rank, seat_.size, options);
  std::string why;
  try {
    made.kernels = std::make_shared<LowLatency>(
        seat_, topology_, streams_.asynchronous() ? device.index() : -1, deadline);
  } catch (const Error& error) {
    why = error.what();
  }
  // Kernels on all ranks, or on none.
  const auto words =
      exchange_words(seat_, str(topology_.prefix, "low_latency/"), why, what, deadline);
  for (std::size_t rank = 0; rank < words.size(); ++rank)
    if (!words[rank].empty() && low_latency_notes_.empty())
      low_latency_notes_ = str("rank ", rank, ": ", words[rank]);
  if (!low_latency_notes_.empty()) made.kernels = nullptr;
  // The beats must not keep alive what they end.
  made.roll->begin([ranks = std::weak_ptr(made.ranks),
                    kernels = std::weak_ptr(made.kernels)](const std::string& lost) {
    Ends{ranks.lock(), kernels.lock(), nullptr}.abort(lost);
  });
  device_ = device;
  const std::lock_guard<std::mutex> lock(ends_mutex_);
  ends_ = std::move(made);
  return *ends_.ranks;
}

std::string NcclBackend::low_latency_notes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return low_latency_notes_;
}

c10::Device NcclBackend::device_of(const Tensors& tensors, const char* what) const {
  PYPARALLEL_REQUIRE(!tensors.empty(), what, " of no tensors");
  for (const at::Tensor& tensor : tensors) {
    require_here(tensor, what);
    PYPARALLEL_REQUIRE(tensor.device() == tensors.front().device(), what, ": tensors on ",
                       tensor.device().str(), " and ", tensors.front().device().str(),
                       "; a call's tensors are on one device");
  }
  return tensors.front().device();
}

c10::Stream NcclBackend::stream_for(bool caller_waits, c10::Device device) {
  if (caller_waits) return streams_.current(device);
  if (!own_stream_) own_stream_ = streams_.another(device);
  return *own_stream_;
}

void NcclBackend::order_after_last(c10::Stream stream) {
  // Events do not reach into or out of a graph that is being captured.
  if (last_ && last_->stream != stream && last_->capture == streams_.capture_id(stream))
    last_->end.before(stream);
}

void NcclBackend::put(const Spec& spec, Call& call, c10::Device device, c10::Stream stream) {
  nccl::Communicator& ranks = communicator(device, where(spec.name), call.timeout);
  ends_.roll->launched(sequence_, spec.name);
  void* const handle = streams_.handle(stream);
  if (call.small_sum && ends_.kernels && !batch_ && streams_.capture_id(stream) == 0) {
    Dense& data = *call.dense.front();
    if (ends_.kernels->all_reduce(data.data(), data.count(), *call.small_sum, handle, call.timeout))
      return;
  }
  call.run(ranks, handle);
}

// What follows a launch: strided tensors get their values, memory in use is kept.
void NcclBackend::finish(Call& call, c10::Stream caller, c10::Stream stream) {
  const c10::StreamGuard guard(stream);
  for (const auto& data : call.dense) data->write_back();
  if (stream == caller) return;
  for (const auto& data : call.dense) streams_.keep(data->tensor(), stream);
  for (const auto& list : call.outputs)
    for (const at::Tensor& tensor : list) streams_.keep(tensor, stream);
}

NcclBackend::Work NcclBackend::work_of(const Spec& spec, const Tensors& inputs, Call& call,
                                       c10::Device device, c10::Stream stream) {
  NcclWork::Facts facts;
  facts.what = where(spec.name);
  facts.sequence = sequence_;
  facts.device = device;
  facts.outputs = std::move(call.outputs);
  facts.waits_on_host = call.waits_on_host;
  facts.failure = [ends = ends_] { return ends.failure(); };
  facts.absent = [roll = ends_.roll] { return roll->absent(); };
  facts.abort = [ends = ends_](const std::string& why) { ends.abort(why); };
  return c10::make_intrusive<NcclWork>(rank_, spec.type, profiled_title(spec.title, seat_.group),
                                       inputs, std::move(facts), streams_, stream);
}

NcclBackend::Work NcclBackend::start(const Spec& spec, How how, const Tensors& inputs, Call call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  call.timeout = how.timeout.count() < 0 ? timeout_.load() : how.timeout;
  Tensors all = inputs;
  for (const auto& list : call.outputs) all.insert(all.end(), list.begin(), list.end());
  const c10::Device device = device_of(all, spec.name);
  const c10::DeviceGuard guard(device);
  ++sequence_;
  const c10::Stream caller = streams_.current(device);
  if (batch_) {
    // Queued by the group; the stream waits for the caller's in endCoalescing().
    PYPARALLEL_REQUIRE(!batch_->device || *batch_->device == device, where(spec.name),
                       ": tensors on ", device.str(), " and ", batch_->device->str(),
                       " in one coalesced call");
    batch_->device = device;
    batch_->timeout = std::max(batch_->timeout, call.timeout);
    try {
      put(spec, call, device, stream_for(false, device));
    } catch (...) {
      batch_.reset();  // torch does not come to endCoalescing() after an exception
      throw;
    }
    batch_->inputs.insert(batch_->inputs.end(), inputs.begin(), inputs.end());
    batch_->calls.push_back(std::move(call));
    return {};
  }
  const c10::Stream stream = stream_for(how.caller_waits, device);
  if (stream != caller) Mark(streams_, caller).before(stream);
  order_after_last(stream);
  put(spec, call, device, stream);
  streams_.settle(stream);
  finish(call, caller, stream);
  if (stream != caller)
    for (const at::Tensor& tensor : inputs) streams_.keep(tensor, stream);
  last_.emplace(Last{Mark(streams_, stream), stream, streams_.capture_id(stream)});
  if (how.caller_waits && !call.waits_on_host) return {};
  return work_of(spec, inputs, call, device, stream);
}

void NcclBackend::startCoalescing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  PYPARALLEL_REQUIRE(!batch_, "group ", seat_.group,
                     ": startCoalescing() twice without endCoalescing()");
  batch_.emplace();
  batch_->group = std::make_unique<nccl::Group>();
}

NcclBackend::Work NcclBackend::endCoalescing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  PYPARALLEL_REQUIRE(batch_, "group ", seat_.group, ": endCoalescing() without startCoalescing()");
  Batch batch = std::move(*batch_);
  batch_.reset();
  if (batch.calls.empty()) return {};
  const c10::Device device = *batch.device;
  const c10::DeviceGuard guard(device);
  const c10::Stream caller = streams_.current(device), stream = stream_for(false, device);
  if (stream != caller) Mark(streams_, caller).before(stream);
  order_after_last(stream);
  ends_.ranks->set_timeout(batch.timeout);
  batch.group->run();
  streams_.settle(stream);
  Call whole;
  for (Call& call : batch.calls) {
    finish(call, caller, stream);
    whole.outputs.insert(whole.outputs.end(), call.outputs.begin(), call.outputs.end());
  }
  if (stream != caller)
    for (const at::Tensor& tensor : batch.inputs) streams_.keep(tensor, stream);
  last_.emplace(Last{Mark(streams_, stream), stream, streams_.capture_id(stream)});
  return work_of({c10d::OpType::COALESCED, "coalesced", "pyparallel:coalesced"}, batch.inputs,
                 whole, device, stream);
}

std::string NcclBackend::Ends::failure() const {
  std::string why = ranks ? ranks->failure() : "";
  return why.empty() && kernels ? kernels->failure() : why;
}

void NcclBackend::Ends::abort(const std::string& why) const {
  if (kernels) kernels->abort();
  if (roll) roll->end(why);
  if (ranks) ranks->abort(why, Deadline::after(kAbortTime));
}

NcclBackend::Ends NcclBackend::ends() const {
  const std::lock_guard<std::mutex> lock(ends_mutex_);
  return ends_;
}

c10d::ErrorType NcclBackend::getError() {
  return ends().failure().empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
}

void NcclBackend::abort() {
  ends().abort(str("abort() of group ", seat_.group, " was called on rank ", seat_.rank));
}

void NcclBackend::shutdown() {
  const Ends all = ends();
  if (!all.ranks) return;
  try {
    all.ranks->close(Deadline::after(timeout_.load()));
  } catch (...) {
    all.roll->leave();
    throw;
  }
  all.roll->leave();
}

void NcclBackend::setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

}  // namespace pyparallel::dist
