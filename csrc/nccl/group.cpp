#include "nccl/group.h"

#include <algorithm>
#include <map>
#include <utility>

#include "nccl/communicator.h"
#include "nccl/watchdog.h"

namespace pyparallel::nccl {
namespace {

struct ThreadState {
  int depth = 0;
  std::vector<Operation> queued;
};
thread_local ThreadState state;

}  // namespace

Group::Group() : mark_(state.queued.size()) { ++state.depth; }

Group::~Group() {
  if (!open_) return;
  --state.depth;
  if (state.queued.size() > mark_) {
    state.queued.erase(state.queued.begin() + static_cast<std::ptrdiff_t>(mark_),
                       state.queued.end());
  }
}

void Group::run() {
  PYPARALLEL_REQUIRE(open_, "this group has already been run");
  open_ = false;
  if (--state.depth > 0) return;
  std::vector<Operation> operations = std::exchange(state.queued, {});
  if (!operations.empty()) Communicator::launch(operations);
}

float Group::simulate() {
  PYPARALLEL_REQUIRE(open_, "this group has already been run");
  PYPARALLEL_REQUIRE(state.depth == 1, "a group inside another cannot be simulated by itself");
  open_ = false;
  --state.depth;
  std::vector<Operation> operations = std::exchange(state.queued, {});
  PYPARALLEL_REQUIRE(!operations.empty(), "simulation of a group without calls");
  PYPARALLEL_NCCL_NEED(operations.front().communicator->library(), GroupSimulateEnd);
  SimulationRecord record;
  Communicator::launch(operations, &record);
  return record.estimated_time;
}

bool Group::active() noexcept { return state.depth > 0; }

void Group::submit(Operation operation) {
  if (active()) {
    state.queued.push_back(std::move(operation));
    return;
  }
  std::vector<Operation> one;
  one.push_back(std::move(operation));
  Communicator::launch(one);
}

void Communicator::launch(std::vector<Operation>& operations, SimulationRecord* simulation) {
  std::vector<Communicator*> members;
  for (const Operation& operation : operations) members.push_back(operation.communicator.get());
  std::sort(members.begin(), members.end());
  members.erase(std::unique(members.begin(), members.end()), members.end());

  const Operation& first = operations.front();
  const Library& library = first.communicator->library();
  const Deadline deadline = first.communicator->deadline();
  const bool grouped = operations.size() > 1 || simulation != nullptr;
  const std::string whole =
      grouped ? str("group of ", operations.size(), " calls from ", first.text) : first.text;

  std::vector<std::unique_lock<CallMutex>> locks;
  std::map<Communicator*, RawComm> handles;
  for (Communicator* member : members) {  // in the order of their addresses: no two groups deadlock
    PYPARALLEL_REQUIRE(&member->library() == &library,
                       "a group spans two libraries: ", library.describe(), " and ",
                       member->library().describe());
    locks.push_back(member->enter(whole, deadline));
    member->require_running(whole);
    handles[member] = member->handle();
    if (member->unsettled_) member->settle(handles[member], "an earlier call", deadline);
    member->release_pending(handles[member]);
  }
  struct Inside {
    const std::vector<Communicator*>& members;
    ~Inside() {
      for (Communicator* member : members) {
        member->watch_->left();
      }
    }
  } inside{members};
  for (Communicator* member : members) {
    member->watch_->entered(whole, deadline);
  }

  if (grouped)
    check(library, library->GroupStart(), "ncclGroupStart", nullptr, first.communicator->where());
  Result result = Result::success;
  const Operation* failed = nullptr;
  for (const Operation& operation : operations) {
    result = operation.call(handles[operation.communicator.get()]);
    if (result != Result::success && result != Result::in_progress) {
      failed = &operation;
      break;
    }
  }
  if (grouped) {
    // Also after a failure, which it then repeats.
    const Result ended =
        simulation == nullptr ? library->GroupEnd() : library->GroupSimulateEnd(simulation);
    if (failed == nullptr) result = ended;
  }
  const Operation& blamed = failed != nullptr ? *failed : first;
  const std::string& text = failed != nullptr ? failed->text : whole;
  if (result != Result::success && result != Result::in_progress) {
    for (Communicator* member : members) member->unsettled_ = !member->blocking_;
    blamed.communicator->finish(result, handles[blamed.communicator.get()], text, deadline);
  }
  for (Communicator* member : members) {
    if (!member->blocking_) member->settle(handles[member], whole, deadline);
  }
  if (simulation != nullptr) return;

  for (const Operation& operation : operations) {
    Communicator& member = *operation.communicator;
    const std::uint64_t number = ++member.sequence_;
    if (member.options_.watch && (&operation == &operations.back() || !grouped ||
                                  (&operation)[1].stream != operation.stream ||
                                  (&operation)[1].communicator != operation.communicator)) {
      member.watch_->launched(operation.stream, str(operation.text, " #", number),
                              member.deadline());
    }
  }
}

}  // namespace pyparallel::nccl
