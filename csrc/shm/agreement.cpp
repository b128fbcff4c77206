// Whether all ranks called the same thing. Every rank compares the same headers, so all raise
// alike.

#include <functional>

#include "shm/group.h"

namespace pyparallel::shm {
namespace {

// "1000 1000 1001": a value of each rank's header.
std::string by_rank(const Group& group,
                    const std::function<std::string(const CallHeader&)>& value) {
  std::string text;
  for (int r = 0; r < group.size(); ++r) text += str(r == 0 ? "" : " ", value(group.header(r)));
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

// all_to_all: what i sends to j must be what j expects from i.
std::string pairwise_misfit(const Group& group) {
  const int n = group.size();
  bool uniform = true;
  for (int r = 0; r < n; ++r) uniform = uniform && group.header(r).uniform();
  if (uniform && all_alike(group, [](const CallHeader& h) { return h.count; })) return "";
  const auto sent = [&](int from, int to) {
    return group.header(from).uniform() ? group.header(from).count : group.counts(from)[to];
  };
  const auto expected = [&](int from, int to) {
    return group.header(to).uniform() ? group.header(to).count : group.counts(to)[n + from];
  };
  for (int from = 0; from < n; ++from)
    for (int to = 0; to < n; ++to)
      if (sent(from, to) != expected(from, to))
        return str("counts differ: rank ", from, " sends ", sent(from, to), " elements to rank ",
                   to, ", which expects ", expected(from, to));
  return "";
}

// scatter, gather: the root's count for each rank against that rank's own.
std::string rooted_misfit(const Group& group) {
  const int root = group.header(0).root;
  const bool scatter = group.header(0).op == Op::scatter;
  for (int r = 0; r < group.size(); ++r) {
    const std::uint64_t at_root = group.counts(root)[r];
    const std::uint64_t own = group.counts(r)[group.size()];
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
  const auto note_of = [&](int r) { return std::string(group.note(r)); };
  std::string text;
  int texts = 0;
  for (int r = 0; r < group.size(); ++r) {
    const std::string note = note_of(r);
    bool seen = false;
    for (int before = 0; before < r; ++before) seen = seen || note_of(before) == note;
    if (seen) continue;
    text += str(texts++ == 0 ? "rank " : "; rank ", r);
    for (int other = r + 1; other < group.size(); ++other)
      if (note_of(other) == note) text += str(", ", other);
    text += note.empty() ? str(": ", name_of(group.header(r).op), ", called for itself")
                         : str(": ", note);
  }
  return texts > 1 ? text : "";
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
    add("roots differ: " + by_rank(group, [](const CallHeader& h) { return str(h.root); }));
  if (has_one_count(first.op) && !all_alike(group, [](const CallHeader& h) { return h.count; }))
    add("element counts differ: " +
        by_rank(group, [](const CallHeader& h) { return str(h.count); }));
  if (has_count_vector(first.op) && !digests_alike)
    add("lists of block sizes differ between ranks; each rank's own block, in elements (rows times "
        "the length of a row): " +
        by_rank(group, [](const CallHeader& h) { return str(h.count); }) +
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
