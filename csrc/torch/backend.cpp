#include "torch/backend.h"

#include <algorithm>

#include "base/error.h"

namespace pyparallel::dist {
namespace {

// Run once, by the worker; dropped unrun when the communicator closes first.
struct QueuedCall {
  c10::intrusive_ptr<QueuedWork> work;
  std::function<void()> call;
  ~QueuedCall() { work->drop(); }  // no effect on a finished work
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> Backend::create(const Seat& seat, const GlooFactory& gloo) {
  return c10::make_intrusive<Backend>(seat, gloo, open_group(seat, gloo));
}

Backend::Backend(Seat seat, GlooFactory gloo, std::shared_ptr<shm::Communicator> communicator)
    : c10d::Backend(seat.rank, seat.size),
      seat_(std::move(seat)),
      gloo_(std::move(gloo)),
      communicator_(std::move(communicator)),
      options_(c10::make_intrusive<GroupOptions>(seat_.group, seat_.timeout)),
      other_devices_(seat_) {
  init();
}

Backend::~Backend() { communicator_->close(); }

void Backend::refuse(const char* name, const InvalidArgument& error) {
  const std::string why = error.what();
  const auto communicator = communicator_;
  // Through the queue: the refusal takes its turn after the calls that were started before.
  communicator->enqueue([communicator, name, why] { communicator->refuse(name, why); });
  throw InvalidArgument(str(name, ", group ", seat_.group, ", rank ", seat_.rank, ": ", why));
}

Backend::Work Backend::enqueue(const Spec& spec, std::chrono::milliseconds timeout,
                               const Tensors& inputs, Outputs outputs, Call call) {
  auto queued = std::make_shared<QueuedCall>();
  queued->work = c10::make_intrusive<QueuedWork>(rank_, spec.type, spec.title, inputs,
                                                 std::move(outputs), communicator_->sequence());
  // Owns the communicator: it must live as long as the worker is in the call.
  queued->call = [communicator = communicator_, timeout, call = std::move(call)] {
    call(*communicator, Deadline::after(timeout));
  };
  Work work = queued->work;
  auto run = [queued = std::move(queued)] {
    queued->work->run(queued->call);
    queued->call = nullptr;  // lets go of the tensors
  };
  {
    const std::lock_guard<std::mutex> lock(batch_mutex_);
    if (batch_) {
      batch_->calls.push_back(std::move(run));
      batch_->parts.push_back(work);
      return work;
    }
  }
  communicator_->enqueue(std::move(run));
  return work;
}

void Backend::startCoalescing() {
  const std::lock_guard<std::mutex> lock(batch_mutex_);
  PYPARALLEL_REQUIRE(!batch_, "group ", seat_.group,
                     ": startCoalescing() twice without endCoalescing()");
  batch_.emplace();
  coalescing_ = true;
}

Backend::Work Backend::endCoalescing() {
  Batch batch;
  {
    const std::lock_guard<std::mutex> lock(batch_mutex_);
    PYPARALLEL_REQUIRE(batch_, "group ", seat_.group,
                       ": endCoalescing() without startCoalescing()");
    batch = std::move(*batch_);
    batch_.reset();
    coalescing_ = false;
  }
  if (!batch.calls.empty()) {
    communicator_->enqueue([calls = std::move(batch.calls)] {
      for (const auto& call : calls) call();
    });
  }
  return c10::make_intrusive<BatchWork>(rank_, std::move(batch.parts));
}

Backend::Work Backend::track_message(const Spec& spec, const at::Tensor& tensor, Dense data,
                                     std::shared_ptr<shm::Work> started) {
  orphans_->sweep();
  Work work =
      c10::make_intrusive<MessageWork>(rank_, spec.type, spec.title, tensor, std::move(data),
                                       std::move(started), communicator_->timeout(), orphans_);
  if (coalescing_) {
    const std::lock_guard<std::mutex> lock(batch_mutex_);
    if (batch_) batch_->parts.push_back(work);
  }
  return work;
}

Backend::Work Backend::send(Tensors& tensors, int destination, int tag) {
  PYPARALLEL_REQUIRE(tensors.size() == 1, "send of ", tensors.size(), " tensors; expected one");
  if (auto* device = device_backend(tensors)) return device->send(tensors, destination, tag);
  const at::Tensor& tensor = tensors.front();
  require_dense_cpu(tensor, "the tensor to send");
  const Element element = element_of(tensor.scalar_type());
  Dense data(tensor, Dense::Use::read, element);
  auto started = communicator_->isend(data.data(), data.count(), element.dtype, destination, tag);
  return track_message({c10d::OpType::SEND, "send", "pyparallel:send"}, tensor, std::move(data),
                       std::move(started));
}

Backend::Work Backend::receive(Tensors& tensors, int source, int tag, const Spec& spec) {
  const at::Tensor& tensor = tensors.front();
  require_dense_cpu(tensor, "the tensor to receive into");
  const Element element = element_of(tensor.scalar_type());
  Dense data(tensor, Dense::Use::write, element);
  auto started = communicator_->irecv(data.data(), data.count(), element.dtype, source, tag);
  return track_message(spec, tensor, std::move(data), std::move(started));
}

Backend::Work Backend::recv(Tensors& tensors, int source, int tag) {
  PYPARALLEL_REQUIRE(tensors.size() == 1, "recv into ", tensors.size(), " tensors; expected one");
  if (auto* device = device_backend(tensors)) return device->recv(tensors, source, tag);
  return receive(tensors, source, tag, {c10d::OpType::RECV, "recv", "pyparallel:recv"});
}

Backend::Work Backend::recvAnysource(Tensors& tensors, int tag) {
  PYPARALLEL_REQUIRE(tensors.size() == 1, "recv into ", tensors.size(), " tensors; expected one");
  if (auto* device = device_backend(tensors)) return device->recvAnysource(tensors, tag);
  return receive(tensors, shm::Communicator::any_source, tag,
                 {c10d::OpType::RECVANYSOURCE, "recv", "pyparallel:recv_any_source"});
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  communicator_->set_timeout(timeout);
  options_->timeout = timeout;
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& opts) {
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  if (mine == ranks.end()) return nullptr;
  Seat seat;
  seat.store = store;
  seat.rank = static_cast<int>(mine - ranks.begin());
  seat.size = static_cast<int>(ranks.size());
  seat.group = opts && !opts->group_name.empty() ? opts->group_name : str(seat_.group, ":split");
  seat.timeout = opts ? opts->timeout : communicator_->timeout();
  return create(seat, gloo_);
}

c10d::ErrorType Backend::getError() {
  return communicator_->failure().empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
}

void Backend::abort() {
  communicator_->abort(str("abort() of group ", seat_.group, " was called on rank ", seat_.rank));
  if (const auto device = other_devices_.made()) device->abort();
}

void Backend::shutdown() {
  communicator_->close();
  if (const auto device = other_devices_.made()) device->shutdown();
}

}  // namespace pyparallel::dist
