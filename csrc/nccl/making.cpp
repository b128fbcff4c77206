// How communicators come into being: from unique ids, or out of another communicator.
#include <utility>

#include "nccl/background.h"
#include "nccl/communicator.h"
#include "nccl/poll.h"
#include "nccl/watchdog.h"

namespace pyparallel::nccl {
namespace {

bool can_poll(const Library& library) {
  return library->CommInitRankConfig != nullptr && library->CommGetAsyncError != nullptr &&
         library->CommAbort != nullptr;
}

// A handle in the making. The library may write it, and read the record, long after its call has
// returned or its caller has given up: all of it lives on the heap, held by whoever still needs it.
struct Making {
  Making(std::shared_ptr<const Library> used, const Config& asked)
      : library(std::move(used)), config(asked), record(config.record(*library)) {}

  const std::shared_ptr<const Library> library;
  const Config config;  // the record points into it
  ConfigRecord record;
  RawComm made = nullptr;
  Result result = Result::in_progress;

  std::mutex mutex;
  bool returned = false, abandoned = false;

  RawComm handle() { return __atomic_load_n(&made, __ATOMIC_ACQUIRE); }

  // Ends what has been made so far. `self` stays until the library has let go of it.
  static void discard(std::shared_ptr<Making> self) noexcept {
    const RawComm handle = self->handle();
    // Without CommAbort (before 2.4) the handle can only be left.
    if (handle == nullptr || (*self->library)->CommAbort == nullptr) return;
    run_detached([self = std::move(self), handle] { (*self->library)->CommAbort(handle); });
  }

  // Nobody waits any more. When the library's call is still to return, its thread cleans up.
  static void abandon(const std::shared_ptr<Making>& self) noexcept {
    const std::lock_guard<std::mutex> lock(self->mutex);
    self->abandoned = true;
    if (self->returned) discard(self);
  }
};

// Makes the call; a blocking one on a thread of its own. Gives false when it has not returned by
// the deadline: `making` is abandoned then.
bool call_library(const std::shared_ptr<Making>& making, bool blocking,
                  const std::function<Result(RawComm*, ConfigRecord*)>& call, Deadline deadline) {
  const auto run = [making, call] {
    const Result result = call(&making->made, &making->record);
    const std::lock_guard<std::mutex> lock(making->mutex);
    making->result = result;
    making->returned = true;
    if (making->abandoned && (result == Result::success || result == Result::in_progress)) {
      Making::discard(making);
    }
  };
  if (!blocking) {
    run();
    return true;
  }
  try {
    run_with_deadline(run, deadline);
  } catch (...) {  // Ctrl-C
    Making::abandon(making);
    throw;
  }
  const std::lock_guard<std::mutex> lock(making->mutex);
  making->abandoned = !making->returned;
  return making->returned;
}

std::string late(const std::string& text, Deadline deadline, const Library& library) {
  return str(text, ": not all ranks have come after ", deadline.timeout_seconds(), " s; ",
             library.describe());
}

}  // namespace

Communicator::Communicator(std::shared_ptr<const Library> library, const Options& options)
    : library_(std::move(library)),
      options_(options),
      fork_generation_(fork_generation()),
      timeout_(options.timeout) {
  PYPARALLEL_REQUIRE(options.timeout.count() > 0, "communicator ", options.name,
                     ": the timeout must be positive, got ", options.timeout.count(), " ms");
  const Library& found = *library_;
  blocking_ = options.blocking.value_or(!can_poll(found));
  if (options.config.blocking.has_value()) {
    PYPARALLEL_REQUIRE(
        !options.blocking.has_value() || *options.blocking == (*options.config.blocking != 0),
        "communicator ", options.name, ": blocking and config.blocking differ");
    blocking_ = *options.config.blocking != 0;
  }
  if (!blocking_ && !can_poll(found)) {
    throw Unsupported(str("communicator ", options.name,
                          ": a non-blocking communicator needs ncclCommInitRankConfig, "
                          "ncclCommGetAsyncError and ncclCommAbort (NCCL 2.14.3); found ",
                          found.describe(), "; pass blocking=true"));
  }
  if (found->CommInitRankConfig != nullptr) options_.config.blocking = blocking_ ? 1 : 0;
}

UniqueId make_unique_id(const Library& library) {
  UniqueId id{};
  check(library, library->GetUniqueId(&id), "ncclGetUniqueId");
  return id;
}

std::shared_ptr<Communicator> Communicator::init(std::shared_ptr<const Library> library,
                                                 const std::vector<UniqueId>& ids, int rank,
                                                 int size, const Options& options) {
  PYPARALLEL_REQUIRE(size > 0, "communicator ", options.name, ": the size must be positive, got ",
                     size);
  PYPARALLEL_REQUIRE(rank >= 0 && rank < size, "communicator ", options.name, ": rank ", rank,
                     " is not in 0..", size - 1);
  PYPARALLEL_REQUIRE(!ids.empty(), "communicator ", options.name, ": no unique id");
  PYPARALLEL_REQUIRE(static_cast<int>(ids.size()) <= size, "communicator ", options.name, ": ",
                     ids.size(), " unique ids for ", size, " ranks");
  if (ids.size() > 1) PYPARALLEL_NCCL_NEED(*library, CommInitRankScalable);
  const std::string text =
      str("creating communicator ", options.name, " (rank ", rank, " of ", size, ")");
  return start(library, options, text,
               [library, ids, rank, size](RawComm* made, ConfigRecord* config) {
                 if (ids.size() > 1) {
                   std::vector<UniqueId> own = ids;
                   return (*library)->CommInitRankScalable(
                       made, size, rank, static_cast<int>(own.size()), own.data(), config);
                 }
                 return (*library)->CommInitRankConfig != nullptr
                            ? (*library)->CommInitRankConfig(made, size, ids[0], rank, config)
                            : (*library)->CommInitRank(made, size, ids[0], rank);
               });
}

std::vector<std::shared_ptr<Communicator>> Communicator::init_all(
    std::shared_ptr<const Library> library, const std::vector<int>& devices,
    const Options& options) {
  PYPARALLEL_NCCL_NEED(*library, CommInitAll);
  PYPARALLEL_REQUIRE(!devices.empty(), "communicator ", options.name, ": init_all of no devices");
  PYPARALLEL_REQUIRE(options.blocking.value_or(true), "communicator ", options.name,
                     ": ncclCommInitAll makes blocking communicators");
  Options own = options;
  own.blocking = true;
  struct All {  // the library may write it after the deadline
    std::vector<RawComm> made;
    Result result = Result::in_progress;
    bool abandoned = false;
    std::mutex mutex;
    static void discard(const std::shared_ptr<const Library>& used, const RawComm& handle) {
      if (handle == nullptr || (*used)->CommAbort == nullptr) return;
      run_detached([used, handle] { (*used)->CommAbort(handle); });
    }
  };
  const auto all = std::make_shared<All>();
  all->made.resize(devices.size());
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (std::size_t i = 0; i < devices.size(); ++i)
    ranks.emplace_back(new Communicator(library, own));
  const std::string text =
      str("ncclCommInitAll(", devices.size(), " devices) of communicator ", options.name);
  const Deadline deadline = ranks.front()->deadline();
  const auto give_up = [library, all] {
    const std::lock_guard<std::mutex> lock(all->mutex);
    all->abandoned = true;
    for (RawComm& handle : all->made) All::discard(library, std::exchange(handle, nullptr));
  };
  try {
    const bool done = run_with_deadline(
        [library, all, devices] {
          std::vector<RawComm> made(devices.size());
          const Result result = (*library)->CommInitAll(
              made.data(), static_cast<int>(devices.size()), devices.data());
          const std::lock_guard<std::mutex> lock(all->mutex);
          all->result = result;
          if (result != Result::success) return;
          all->made = made;
          if (!all->abandoned) return;
          for (const RawComm handle : made) All::discard(library, handle);
        },
        deadline);
    if (!done)
      throw Timeout(str(text, " has not returned after ", deadline.timeout_seconds(), " s"));
    check(*library, all->result, text);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const RawComm handle = all->made[i];
      ranks[i]->adopt(handle, text, deadline);
      all->made[i] = nullptr;  // its communicator's, from now on
    }
  } catch (...) {
    give_up();
    throw;
  }
  return ranks;
}

std::shared_ptr<Communicator> Communicator::join_grown(std::shared_ptr<const Library> library,
                                                       const UniqueId& id, int rank, int new_size,
                                                       const Options& options) {
  PYPARALLEL_NCCL_NEED(*library, CommGrow);
  PYPARALLEL_REQUIRE(rank >= 0 && rank < new_size, "communicator ", options.name, ": rank ", rank,
                     " is not in 0..", new_size - 1);
  const std::string text =
      str("joining communicator ", options.name, " (rank ", rank, " of ", new_size, ")");
  return start(library, options, text,
               [library, id, rank, new_size](RawComm* made, ConfigRecord* config) {
                 return (*library)->CommGrow(nullptr, new_size, &id, rank, made, config);
               });
}

std::shared_ptr<Communicator> Communicator::start(
    std::shared_ptr<const Library> library, const Options& options, const std::string& text,
    const std::function<Result(RawComm*, ConfigRecord*)>& call) {
  std::shared_ptr<Communicator> self(new Communicator(library, options));
  const Deadline deadline = self->deadline();
  auto making = std::make_shared<Making>(library, self->options_.config);
  if (!call_library(making, self->blocking_, call, deadline)) {
    throw Timeout(late(text, deadline, *library));
  }
  // After a failed call the library has freed what it made.
  check(*library, making->result, text);
  try {
    self->adopt(making->handle(), text, deadline);
  } catch (...) {
    Making::discard(making);
    throw;
  }
  return self;
}

void Communicator::adopt(RawComm handle, const std::string& text, Deadline deadline) {
  const Library& library = *library_;
  if (handle == nullptr) {
    throw InternalError(
        str(text, ": NCCL reports success but gives no communicator; ", library.describe()));
  }
  if (!blocking_) {
    Result state = Result::in_progress;
    for (Poll poll;; poll.pause()) {
      check(library, library->CommGetAsyncError(handle, &state), "ncclCommGetAsyncError", handle,
            text);
      if (state != Result::in_progress) break;
      if (deadline.expired()) throw Timeout(late(text, deadline, library));
    }
    check(library, state, text, handle);
  }
  check(library, library->CommUserRank(handle, &rank_), "ncclCommUserRank", handle, text);
  check(library, library->CommCount(handle, &size_), "ncclCommCount", handle, text);
  check(library, library->CommCuDevice(handle, &device_), "ncclCommCuDevice", handle, text);
  watch_ = std::make_shared<Watch>(context_of_device(device_));
  Watchdog::add(weak_from_this());  // before it owns the handle: nothing throws after that
  const std::lock_guard<std::mutex> lock(state_);
  handle_ = handle;
}

// --- out of another communicator

Options Communicator::child_options(const std::optional<Options>& asked) const {
  Options options = asked.value_or(options_);
  if (!asked.has_value()) {
    options.timeout = timeout_.load();
    options.explain = nullptr;
  }
  if (!options.blocking.has_value() && !options.config.blocking.has_value())
    options.blocking = blocking_;
  return options;
}

std::shared_ptr<Communicator> Communicator::make_child(const std::string& text,
                                                       const std::optional<Options>& asked,
                                                       bool after_failure, const MakeHandle& call) {
  std::shared_ptr<Communicator> child(new Communicator(library_, child_options(asked)));
  const Deadline deadline = child->deadline();
  const auto lock = enter(text, deadline, after_failure);
  RawComm parent = nullptr;
  {
    const std::lock_guard<std::mutex> state(state_);
    parent = handle_;
  }
  {
    const std::lock_guard<std::mutex> state(state_);
    PYPARALLEL_REQUIRE(pause_ != Pause::suspended, where(), ": ", text,
                       ": the communicator is suspended; call resume() first");
  }
  release_pending(parent);

  auto making = std::make_shared<Making>(library_, child->options_.config);
  const bool inherit = !asked.has_value();
  const auto make = [call, parent, inherit](RawComm* made, ConfigRecord* record) {
    return call(parent, made, inherit ? nullptr : record);
  };
  if (!call_library(making, blocking_, make, deadline)) {
    fail(Status::timeout, late(text, deadline, library()));
    end_after_failure();
    throw_failure();
  }
  try {
    if (after_failure) {
      // The parent's own state is its failure; only the child can tell how far it is.
      check(library(), making->result, text, parent, where());
      for (Poll poll; making->handle() == nullptr && !deadline.expired();) poll.pause();
    } else {
      finish(making->result, parent, text, deadline);
    }
    if (making->handle() == nullptr) return nullptr;
    child->adopt(making->handle(), text, deadline);
  } catch (...) {
    // The library may still be at it until the parent has been aborted: `making` is not freed.
    if (making->handle() == nullptr && making->result == Result::in_progress) {
      static_cast<void>(new std::shared_ptr<Making>(making));
    }
    Making::discard(making);
    throw;
  }
  return child;
}

std::shared_ptr<Communicator> Communicator::split(int color, int key,
                                                  const std::optional<Options>& options) {
  PYPARALLEL_NCCL_NEED(library(), CommSplit);
  PYPARALLEL_REQUIRE(color >= split_no_color, where(), ": split with color ", color,
                     "; colors are not negative, ", split_no_color, " stands for no group");
  auto child = make_child(
      str("ncclCommSplit(color ", color, ", key ", key, ")"), options, false,
      [library = library_, color, key](RawComm parent, RawComm* made, ConfigRecord* config) {
        return (*library)->CommSplit(parent, color, key, made, config);
      });
  if (child == nullptr && color != split_no_color) {
    throw InternalError(str(where(), ": ncclCommSplit(color ", color, ") gives no communicator"));
  }
  return child;
}

std::shared_ptr<Communicator> Communicator::shrink(const std::vector<int>& excluded,
                                                   bool abort_work,
                                                   const std::optional<Options>& options) {
  PYPARALLEL_NCCL_NEED(library(), CommShrink);
  std::string list;
  for (const int gone : excluded) {
    check_rank(gone, "excluded rank", "shrink");
    PYPARALLEL_REQUIRE(gone != rank_, where(), ": shrink is called by the ranks that stay, not by ",
                       gone);
    list += str(list.empty() ? "" : ", ", gone);
  }
  PYPARALLEL_REQUIRE(!excluded.empty(), where(), ": shrink without a rank to exclude");
  auto child = make_child(str("ncclCommShrink(without ", list, ")"), options, abort_work,
                          [library = library_, excluded, abort_work](RawComm parent, RawComm* made,
                                                                     ConfigRecord* config) {
                            std::vector<int> ranks = excluded;
                            return (*library)->CommShrink(
                                parent, ranks.data(), static_cast<int>(ranks.size()), made, config,
                                abort_work ? shrink_abort : shrink_default);
                          });
  if (child == nullptr) {
    throw Timeout(
        str(where(), ": ncclCommShrink(without ", list, ") has made no communicator in time"));
  }
  return child;
}

UniqueId Communicator::grow_id() {
  PYPARALLEL_NCCL_NEED(library(), CommGetUniqueId);
  const auto lock = enter("ncclCommGetUniqueId", deadline());
  UniqueId id{};
  const RawComm handle = this->handle();
  finish(library()->CommGetUniqueId(handle, &id), handle, "ncclCommGetUniqueId", deadline());
  return id;
}

std::shared_ptr<Communicator> Communicator::grow(int new_size, const std::optional<UniqueId>& id,
                                                 const std::optional<Options>& options) {
  PYPARALLEL_NCCL_NEED(library(), CommGrow);
  PYPARALLEL_REQUIRE(new_size > size_, where(), ": grow to ", new_size,
                     " ranks, of which there are ", size_, " now");
  auto child = make_child(
      str("ncclCommGrow(to ", new_size, " ranks)"), options, false,
      [library = library_, new_size, id](RawComm parent, RawComm* made, ConfigRecord* config) {
        return (*library)->CommGrow(parent, new_size, id.has_value() ? &*id : nullptr, -1, made,
                                    config);
      });
  if (child == nullptr) throw InternalError(str(where(), ": ncclCommGrow gives no communicator"));
  return child;
}

}  // namespace pyparallel::nccl
