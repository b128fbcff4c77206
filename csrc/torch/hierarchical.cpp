#include "torch/hierarchical.h"

#include <algorithm>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/interrupt.h"
#include "base/observer.h"
#include "torch/hierarchical_record.h"

namespace pyparallel::dist {
namespace {

constexpr std::chrono::milliseconds glance(50);
constexpr std::int64_t internal_tag =
    INT64_MIN + 7;  // of messages inside a host; callers' are >= 0

std::string describe_host(const Topology& topology, std::size_t host) {
  std::string ranks;
  for (const int rank : topology.hosts[host]) {
    ranks += pyparallel::str(ranks.empty() ? "" : ", ", rank);
  }
  return pyparallel::str("host ", topology.identities[host], " (ranks ", ranks, ")");
}

}  // namespace

// --- joining

std::shared_ptr<shm::Communicator> HierarchicalCommunicator::join(const Seat& seat,
                                                                  const Topology& topology,
                                                                  const GlooFactory& gloo,
                                                                  Deadline deadline) {
  const int host = topology.host_of[static_cast<std::size_t>(seat.rank)];
  const std::vector<int>& ranks = topology.hosts[static_cast<std::size_t>(host)];
  const auto place = std::find(ranks.begin(), ranks.end(), seat.rank) - ranks.begin();
  shm::Options options;
  options.name =
      pyparallel::str(seat.group, " on ", describe_host(topology, static_cast<std::size_t>(host)),
                      ", here counted from 0");
  options.timeout = seat.timeout;
  auto local =
      shm::Communicator::join(host_unique_id(seat, topology, host, deadline),
                              static_cast<int>(place), static_cast<int>(ranks.size()), options);
  auto self = std::make_shared<HierarchicalCommunicator>(seat, topology, gloo, std::move(local));

  const auto connect = [&](const char* part, int rank, int size) {
    const auto store = c10::make_intrusive<c10d::PrefixStore>(
        pyparallel::str(topology.prefix, part, "/"), seat.store);
    try {
      return gloo(store, rank, size, seat.timeout);
    } catch (const std::exception& error) {
      self->local_->abort("the hosts could not be connected");
      throw PeerLost(pyparallel::str("group ", seat.group, ", rank ", seat.rank,
                                     ": gloo could not connect the ", topology.hosts.size(),
                                     " hosts: ", error.what(),
                                     "; GLOO_SOCKET_IFNAME names the network interface to use"));
    }
  };
  const std::weak_ptr<HierarchicalCommunicator> weak = self;
  self->messages_ = std::make_shared<CrossMessages>(connect("messages", seat.rank, seat.size),
                                                    seat.group, [weak](const Error& error) {
                                                      if (const auto communicator = weak.lock())
                                                        communicator->fail(error);
                                                    });
  if (place == 0) {
    std::vector<std::string> names;
    for (std::size_t h = 0; h < topology.hosts.size(); ++h) {
      names.push_back(describe_host(topology, h));
    }
    self->links_ = std::make_unique<Links>(
        connect("leaders", host, static_cast<int>(topology.hosts.size())), std::move(names),
        [local = self->local_] { return local->failure(); });
  }
  return self;
}

HierarchicalCommunicator::HierarchicalCommunicator(Seat seat, Topology topology, GlooFactory gloo,
                                                   std::shared_ptr<shm::Communicator> local)
    : seat_(std::move(seat)),
      topology_(std::move(topology)),
      gloo_(std::move(gloo)),
      host_(topology_.host_of[static_cast<std::size_t>(seat_.rank)]),
      local_(std::move(local)),
      timeout_ms_(seat_.timeout.count()),
      worker_(pyparallel::str("group ", seat_.group)) {}

// --- small things

const char* HierarchicalCommunicator::name_of_op(Op op) {
  constexpr const char* names[] = {"all_reduce", "reduce",        "reduce_scatter", "all_gather",
                                   "all_to_all", "broadcast",     "scatter",        "gather",
                                   "barrier",    "a refused call"};
  return names[static_cast<std::size_t>(op)];
}

// FNV-1a: equal lists have equal digests.
std::uint64_t HierarchicalCommunicator::digest_of(const Counts& counts) {
  std::uint64_t digest = 14695981039346656037u;
  for (const std::int64_t count : counts) {
    digest = (digest ^ static_cast<std::uint64_t>(count)) * 1099511628211u;
  }
  return digest;
}

std::string HierarchicalCommunicator::here(const char* op) const {
  return pyparallel::str(op, " #", sequence_.load(), ", group ", seat_.group, ", rank ",
                         seat_.rank);
}

int HierarchicalCommunicator::local_index(int rank) const {
  const auto& ranks = local_ranks();
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

void HierarchicalCommunicator::check_rank(const char* what, int rank) const {
  PYPARALLEL_REQUIRE(rank >= 0 && rank < size(), what, " ", rank, ", expected 0 to ", size() - 1);
}

void HierarchicalCommunicator::transfer(const std::vector<Links::Transfer>& sends,
                                        const std::vector<Links::Transfer>& receives,
                                        Deadline deadline) {
  // A little before the host's other ranks give up, so that what is reported is what happened.
  const auto left = deadline.remaining();
  const auto margin = std::min<Deadline::Duration>(left / 10, std::chrono::milliseconds(500));
  const auto time = std::chrono::duration_cast<std::chrono::milliseconds>(left - margin);
  links_->transfer(here(running_), sends, receives, Deadline::after(time));
}

void HierarchicalCommunicator::hand_down(void* data, std::size_t bytes, int rank,
                                         Deadline deadline) {
  const int index = local_index(rank);
  if (index == 0 || bytes == 0) return;
  if (is_leader()) local_->send(data, bytes, DType::u8, index, internal_tag, deadline);
  if (seat_.rank == rank) local_->recv(data, bytes, DType::u8, 0, internal_tag, deadline);
}

void HierarchicalCommunicator::hand_up(void* data, std::size_t bytes, int rank, Deadline deadline) {
  const int index = local_index(rank);
  if (index == 0 || bytes == 0) return;
  if (seat_.rank == rank) local_->send(data, bytes, DType::u8, 0, internal_tag, deadline);
  if (is_leader()) local_->recv(data, bytes, DType::u8, index, internal_tag, deadline);
}

// --- the frame of every collective

void HierarchicalCommunicator::on_worker(const std::function<void()>& call) {
  if (worker_.on_this_thread()) return call();
  const auto work = worker_.add(call);
  bool interrupted = false;
  while (!work->wait_for(glance)) {
    if (interrupted || !interrupt_requested()) continue;
    interrupted = true;  // the worker uses the caller's arrays: it must end first
    fail(Interrupted(here(running_) + ": a signal ended the wait"));
  }
  if (interrupted) throw Interrupted("a signal ended the wait; the group is broken");
  work->rethrow();
}

void HierarchicalCommunicator::collective(const Call& call, Deadline deadline,
                                          const std::function<void()>& check,
                                          const std::function<void()>& body) {
  const Observed observed(name_of_op(call.op), seat_.group);
  const shm::Note* note = shm::take_note(this);  // this thread's, and kept until it leaves another
  on_worker([&] {
    throw_if_failed();
    running_ = name_of_op(call.op);
    Record mine;
    mine.op = call.op;
    mine.dtype = call.dtype;
    mine.reduction = call.reduction;
    mine.root = call.root;
    mine.rank = seat_.rank;
    mine.sequence = ++sequence_;
    mine.count = call.count;
    mine.digest = call.digest;
    if (note != nullptr) {
      mine.digest ^= note->digest;
      mine.set(Record::State::ready, note->view());
    }
    std::optional<InvalidArgument> wrong;
    try {
      check();
    } catch (const InvalidArgument& error) {
      wrong = InvalidArgument(pyparallel::str(here(running_), ": ", error.what()));
      mine.set(Record::State::refused, error.what());
    }
    try {
      agree(mine, deadline);
      body();
    } catch (const Mismatch&) {
      if (wrong) throw *wrong;
      throw;
    } catch (const Error& error) {
      fail(error);
      throw_if_failed();
    } catch (const std::exception& error) {
      fail(Error(Status::internal, here(running_) + ": " + error.what()));
      throw_if_failed();
    }
  });
}

void HierarchicalCommunicator::agree(const Record& mine, Deadline deadline) {
  static_assert(sizeof(Record) == 512, "part of what hosts exchange");
  const auto ranks = static_cast<std::size_t>(local_->size());
  std::vector<Record> records(is_leader() ? ranks : 0);
  std::vector<shm::Block> blocks;
  for (Record& record : records) blocks.push_back({&record, sizeof(Record)});
  Record verdict = mine;
  std::optional<Error> broken;
  try {
    local_->gather({&mine, sizeof(Record)}, blocks.data(), DType::u8, 0, deadline);
    if (is_leader()) verdict = compare(records);
  } catch (const Error& error) {
    if (!is_leader()) throw;
    broken = error;  // the other hosts hear of it
    verdict.set(Record::State::failed, error.what());
  }
  if (is_leader()) {
    std::vector<Record> theirs(static_cast<std::size_t>(hosts()));
    std::vector<Links::Transfer> sends;
    std::vector<Links::Transfer> receives;
    for (int host = 0; host < hosts(); ++host) {
      if (host == host_) continue;
      sends.push_back({host, &verdict, sizeof verdict});
      receives.push_back({host, &theirs[static_cast<std::size_t>(host)], sizeof(Record)});
    }
    try {
      transfer(sends, receives, broken ? Deadline::after(std::chrono::seconds(1)) : deadline);
    } catch (const Error&) {
      if (!broken) throw;
    }
    if (broken) throw_status(broken->status(), broken->what());
    theirs[static_cast<std::size_t>(host_)] = verdict;
    verdict = compare(theirs);
    if (verdict.state == Record::State::failed) {
      throw PeerLost(pyparallel::str(here(running_), ": another host failed: ", verdict.text));
    }
  }
  local_->broadcast(&verdict, sizeof verdict, DType::u8, 0, deadline);
  if (verdict.state == Record::State::ruled_out) throw Mismatch(verdict.text);
}

std::string HierarchicalCommunicator::describe(const Record& record) const {
  std::string text = pyparallel::str("rank ", record.rank, " called ", name_of_op(record.op));
  if (record.count > 0) text += pyparallel::str(" of ", record.count);
  text += pyparallel::str(" ", name_of(record.dtype), ", ", name_of(record.reduction));
  if (record.root >= 0) text += pyparallel::str(", root ", record.root);
  if (record.state == Record::State::ready && record.text[0] != 0) {
    text += pyparallel::str(" (", record.text, ")");
  }
  return text + pyparallel::str(", as its call #", record.sequence);
}

HierarchicalCommunicator::Record HierarchicalCommunicator::compare(
    const std::vector<Record>& records) const {
  Record verdict = records.front();
  for (const Record& record : records) {
    if (!record.valid()) {
      verdict.set(Record::State::failed,
                  "a record between ranks is not valid; the versions of "
                  "pyparallel on the hosts may differ");
      return verdict;
    }
  }
  for (const auto state : {Record::State::failed, Record::State::ruled_out}) {
    for (const Record& record : records) {
      if (record.state == state) return record;
    }
  }
  for (const Record& record : records) {
    if (record.state != Record::State::refused) continue;
    verdict.set(Record::State::ruled_out,
                pyparallel::str(name_of_op(record.op), " #", record.sequence, ", group ",
                                seat_.group, ": rank ", record.rank, " refused: ", record.text));
    return verdict;
  }
  for (const Record& record : records) {
    if (record.matches(records.front())) continue;
    const bool lists = record.count == records.front().count && record.op == records.front().op;
    verdict.set(
        Record::State::ruled_out,
        pyparallel::str("group ", seat_.group, ": ranks differ: ", describe(records.front()), "; ",
                        describe(record), lists ? "; or their lists of counts differ" : ""));
    return verdict;
  }
  return verdict;
}

std::vector<HierarchicalCommunicator::Counts> HierarchicalCommunicator::exchange_counts(
    const Counts& mine, Deadline deadline) {
  const std::size_t width = mine.size();
  std::vector<Counts> by_host(is_leader() ? static_cast<std::size_t>(hosts()) : 0);
  for (std::size_t host = 0; host < by_host.size(); ++host) {
    by_host[host].resize(width * topology_.hosts[host].size());
  }
  std::vector<shm::Block> blocks;
  for (std::size_t i = 0; is_leader() && i < local_ranks().size(); ++i) {
    blocks.push_back({by_host[static_cast<std::size_t>(host_)].data() + i * width, width});
  }
  local_->gather({mine.data(), width}, blocks.data(), DType::i64, 0, deadline);
  std::vector<Counts> rows;
  if (!is_leader()) return rows;
  std::vector<Links::Transfer> sends;
  std::vector<Links::Transfer> receives;
  Counts& own = by_host[static_cast<std::size_t>(host_)];
  for (int host = 0; host < hosts(); ++host) {
    if (host == host_) continue;
    Counts& theirs = by_host[static_cast<std::size_t>(host)];
    sends.push_back({host, own.data(), own.size() * sizeof own[0]});
    receives.push_back({host, theirs.data(), theirs.size() * sizeof theirs[0]});
  }
  transfer(sends, receives, deadline);
  rows.resize(static_cast<std::size_t>(size()));
  for (std::size_t host = 0; host < by_host.size(); ++host) {
    for (std::size_t i = 0; i < topology_.hosts[host].size(); ++i) {
      const auto begin = by_host[host].begin() + static_cast<std::ptrdiff_t>(i * width);
      rows[static_cast<std::size_t>(topology_.hosts[host][i])].assign(
          begin, begin + static_cast<std::ptrdiff_t>(width));
    }
  }
  return rows;
}

void HierarchicalCommunicator::share_finding(const std::string& finding, Deadline deadline) {
  Record verdict;
  if (!finding.empty()) verdict.set(Record::State::ruled_out, finding);
  local_->broadcast(&verdict, sizeof verdict, DType::u8, 0, deadline);
  if (verdict.state != Record::State::ready) {
    throw Mismatch(pyparallel::str(here(running_), ": ", verdict.text));
  }
}

void HierarchicalCommunicator::barrier(Deadline deadline) {
  Call call;
  call.op = Op::barrier;
  collective(call, deadline, [] {}, [] {});  // to agree is to have met
}

void HierarchicalCommunicator::refuse(std::string_view op, std::string_view why) {
  const auto refusal = [self = shared_from_this(), text = pyparallel::str(op, ": ", why)] {
    Call call;
    call.op = Op::refused;
    self->collective(
        call, Deadline::after(self->timeout()), [&] { throw InvalidArgument(text); }, [] {});
  };
  if (!worker_.on_this_thread()) {
    worker_.add(refusal);  // the caller goes on, and knows why already
    return;
  }
  try {
    refusal();
  } catch (const InvalidArgument&) {
    // its own
  }
}

std::shared_ptr<shm::Work> HierarchicalCommunicator::enqueue(std::function<void()> call) {
  throw_if_failed();
  return worker_.add(std::move(call));
}

}  // namespace pyparallel::dist
