#include "symmetric/agreement.h"

#include "base/thread.h"

namespace pyparallel::symmetric {

Outcome Outcome::of(const std::exception_ptr& failure) {
  Outcome outcome;
  if (!failure) return outcome;
  const Cause cause = cause_of(failure);
  outcome.status = static_cast<std::int32_t>(cause.status);
  cause.text.copy(outcome.text, sizeof outcome.text - 1);
  return outcome;
}

void agree(shm::Communicator& group, const std::string& what, const std::exception_ptr& failure,
           Deadline deadline) {
  std::vector<Outcome> outcomes;
  try {
    outcomes = gather_all(group, Outcome::of(failure), deadline);
  } catch (...) {
    // The cause here says more than that the group could not be told.
    if (failure) std::rethrow_exception(failure);
    throw;
  }
  // Every rank throws the same class, that of the lowest failing rank: what catches it to try
  // something else does so on all ranks or on none.
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    Outcome& outcome = outcomes[r];
    if (outcome.status == 0) continue;
    if (static_cast<int>(r) == group.rank()) std::rethrow_exception(failure);
    outcome.text[sizeof outcome.text - 1] = '\0';
    const std::string here = failure ? str(" (and here: ", Outcome::of(failure).text, ")") : "";
    throw_status(static_cast<Status>(outcome.status),
                 str(what, ": rank ", r, " failed: ", outcome.text, here));
  }
}

}  // namespace pyparallel::symmetric
