// Whether all ranks called the same thing. Every rank compares the same headers, so all raise
// alike.

#include <unordered_map>
#include <vector>

#include "shm/group.h"

namespace pyparallel::shm {
namespace {

// Texts of ranks, each once, with the ranks that have it, in the order of their first ranks.
struct Alike {
  std::string text;
  std::vector<int> ranks;

  // "rank 3", "ranks 0-2, 5"
  std::string names() const {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (std::size_t first = 0; first < ranks.size();) {
      std::size_t last = first;
      while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
      text += str(first == 0 ? "" : ", ", ranks[first]);
      if (last > first) text += str(last == first + 1 ? ", " : "-", ranks[last]);
      first = last + 1;
    }
    return text;
  }
};

template <typename TextOf>
std::vector<Alike> alike(const Group& group, const TextOf& text_of) {
  std::vector<Alike> all;
  std::unordered_map<std::string, std::size_t> known;
  for (int r = 0; r < group.size(); ++r) {
    const auto [found, is_new] = known.emplace(text_of(r), all.size());
    if (is_new) all.push_back({found->first, {}});
    all[found->second].ranks.push_back(r);
  }
  return all;
}

// "1000 on ranks 0-2, 4; 1001 on rank 3": a value of each rank's header.
template <typename Value>
std::string by_rank(const Group& group, const Value& value) {
  std::string text;
  for (const Alike& some : alike(group, [&](int r) { return str(value(group.header(r))); }))
    text += str(text.empty() ? "" : "; ", some.text, " on ", some.names());
  return text;
}

template <typename Value>
bool all_alike(const Group& group, const Value& value) {
  for (int r = 1; r < group.size(); ++r)
    if (value(group.header(r)) != value(group.header(0))) return false;
  return true;
}

bool has_reduction(Op op) {
  return op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter;
}
bool has_root(Op op) {
  return op == Op::reduce || op == Op::broadcast || op == Op::scatter || op == Op::gather;
}
bool has_one_count(Op op) {
  return op == Op::all_reduce || op == Op::reduce || op == Op::broadcast;
}
bool has_count_vector(Op op) { return op == Op::reduce_scatter || op == Op::all_gather; }

// No table of counts is in use, and all counts are the same.
bool all_uniform(const Group& group) {
  for (int r = 0; r < group.size(); ++r)
    if (!group.header(r).uniform()) return false;
  return all_alike(group, [](const CallHeader& h) { return h.count; });
}

// An entry of a rank's table of counts.
std::uint64_t count_of(const Group& group, int rank, int entry) {
  const CallHeader& header = group.header(rank);
  return header.uniform() ? header.count : group.counts(rank)[entry];
}

// all_to_all: what i sends to j must be what j expects from i.
std::string pairwise_misfit(const Group& group) {
  if (all_uniform(group)) return "";
  const int n = group.size();
  for (int from = 0; from < n; ++from) {
    for (int to = 0; to < n; ++to) {
      const std::uint64_t sent = count_of(group, from, to);
      const std::uint64_t expected = count_of(group, to, n + from);
      if (sent != expected)
        return str("counts differ: rank ", from, " sends ", sent, " elements to rank ", to,
                   ", which expects ", expected);
    }
  }
  return "";
}

// scatter, gather: the root's count for each rank against that rank's own.
std::string rooted_misfit(const Group& group) {
  if (all_uniform(group)) return "";
  const int root = group.header(0).root;
  const bool scatter = group.header(0).op == Op::scatter;
  for (int r = 0; r < group.size(); ++r) {
    const std::uint64_t at_root = count_of(group, root, r);
    const std::uint64_t own = count_of(group, r, group.size());
    if (at_root != own)
      return str("counts differ: root ", root, scatter ? " sends " : " expects ", at_root,
                 scatter ? " elements to rank " : " elements from rank ", r, ", which ",
                 scatter ? "expects " : "sends ", own);
  }
  return "";
}

// What ranks said of their calls, where that differs: each text once, with its ranks. Empty where
// all said the same or nothing.
std::string notes_misfit(const Group& group) {
  const auto notes = alike(group, [&](int r) { return std::string(group.note(r)); });
  if (notes.size() == 1) return "";
  std::string text;
  for (const Alike& some : notes) {
    text += str(text.empty() ? "" : "; ", some.names(), ": ");
    text += some.text.empty()
                ? str(name_of(group.header(some.ranks.front()).op), ", called for itself")
                : some.text;
  }
  return text;
}

std::string misfit_of(const Group& group) {
  const CallHeader& first = group.header(0);
  std::string text;
  const bool digests_alike = all_alike(group, [](const CallHeader& h) { return h.digest; });
  if (!digests_alike) text = notes_misfit(group);
  if (!text.empty()) return "ranks called different things: " + text;
  const auto add = [&](const std::string& more) { text += (text.empty() ? "" : "; ") + more; };
  if (!all_alike(group, [](const CallHeader& h) { return h.dtype; }))
    add("dtypes differ: " + by_rank(group, [](const CallHeader& h) { return name_of(h.dtype); }));
  if (has_reduction(first.op) && !all_alike(group, [](const CallHeader& h) { return h.reduction; }))
    add("reductions differ: " +
        by_rank(group, [](const CallHeader& h) { return name_of(h.reduction); }));
  if (has_root(first.op) && !all_alike(group, [](const CallHeader& h) { return h.root; }))
    add("roots differ: " + by_rank(group, [](const CallHeader& h) { return h.root; }));
  if (has_one_count(first.op) && !all_alike(group, [](const CallHeader& h) { return h.count; }))
    add("element counts differ: " + by_rank(group, [](const CallHeader& h) { return h.count; }));
  if (has_count_vector(first.op) && !digests_alike)
    add("lists of block sizes differ between ranks; each rank's own block, in elements (rows times "
        "the length of a row): " +
        by_rank(group, [](const CallHeader& h) { return h.count; }) +
        ". Pass the same list of all ranks' sizes on every rank");
  if (text.empty() && !digests_alike && !has_count_vector(first.op))
    add(str("notes differ after their first ", Note::capacity - 1, " characters: ", group.note(0)));
  if (!text.empty()) return text;
  if (first.op == Op::all_to_all) return pairwise_misfit(group);
  if (first.op == Op::scatter || first.op == Op::gather) return rooted_misfit(group);
  return "";
}

}  // namespace

void Group::check_agreement() {
  if (!all_alike(*this, [](const CallHeader& h) { return h.op; })) {
    std::string text;
    for (int r = 0; r < size_; ++r)
      if (header(r).op == Op::refused)
        text += str(text.empty() ? "" : "; ", page(r).refusal[parity()]);
    if (text.empty()) {
      const std::string notes = notes_misfit(*this);
      text = "ranks called different operations: " +
             (notes.empty() ? by_rank(*this, [](const CallHeader& h) { return name_of(h.op); })
                            : notes);
    }
    throw Mismatch(str("call #", sequence(), ", ", group_text(name_, size_), ": ", text));
  }
  const std::string misfit = misfit_of(*this);
  if (!misfit.empty()) throw Mismatch(describe() + ": " + misfit);
}

}  // namespace pyparallel::shm
