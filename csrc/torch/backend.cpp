#include "torch/backend.h"

#include <algorithm>

#include "base/error.h"
#include "torch/profiling.h"

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
      other_devices_(seat_),
      finisher_(std::make_shared<Finisher>(seat_.group)),
      batch_(std::make_shared<CallBatch>(communicator_, seat_.group)) {
  init();
}

Backend::~Backend() { communicator_->close(); }

void Backend::announce_refusal(const std::string& name, const std::string& why) {
  // Through the queue: the refusal takes its turn after the calls that were started before.
  const auto refusal = [communicator = communicator_, name, why] {
    communicator->refuse(name, why);
  };
  if (!batch_->add(refusal, {})) communicator_->enqueue(refusal);
}

void Backend::refuse(const char* name, const InvalidArgument& error) {
  const std::string why = error.what();
  announce_refusal(name, why);
  throw InvalidArgument(str(name, ", group ", seat_.group, ", rank ", seat_.rank, ": ", why));
}

Backend::Work Backend::enqueue(const Spec& spec, std::chrono::milliseconds timeout,
                               const Tensors& inputs, Outputs outputs, Call call) {
  auto queued = std::make_shared<QueuedCall>();
  queued->work =
      c10::make_intrusive<QueuedWork>(rank_, spec.type, profiled_title(spec.title, seat_.group),
                                      inputs, std::move(outputs), communicator_->sequence());
  // Owns the communicator: it must live as long as the worker is in the call.
  queued->call = [communicator = communicator_, timeout, call = std::move(call)] {
    call(*communicator, Deadline::after(timeout));
  };
  const auto work = queued->work;
  std::function<void()> run = [queued = std::move(queued)] {
    queued->work->run(queued->call);
    queued->call = nullptr;  // lets go of the tensors
  };
  if (batch_->is_open()) {
    work->collected_in(batch_);
    if (batch_->add(run, work)) return work;
  }
  communicator_->enqueue(std::move(run));
  return work;
}

void Backend::startCoalescing() { batch_->open(); }

Backend::Work Backend::endCoalescing() {
  auto parts = batch_->close();
  if (parts.size() == 1) return parts.front();
  return c10::make_intrusive<BatchWork>(rank_, std::move(parts), finisher_);
}

void Backend::abandon_coalescing(const std::string& op, const std::string& why) {
  if (batch_->is_open()) batch_->close();
  if (!op.empty()) announce_refusal(op, why);
}

Backend::Work Backend::track_message(const Spec& spec, const at::Tensor& tensor, Dense data,
                                     std::shared_ptr<shm::Work> started) {
  orphans_->sweep();
  Work work = c10::make_intrusive<MessageWork>(
      rank_, spec.type, profiled_title(spec.title, seat_.group), tensor, std::move(data),
      std::move(started), communicator_->timeout(), orphans_, finisher_);
  if (batch_->is_open()) batch_->add(work);
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
  const auto to_device = [timeout](auto& device) {
    if constexpr (requires { device.setTimeout(timeout); }) device.setTimeout(timeout);
  };
  if (const auto device = other_devices_.made()) to_device(*device);
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
