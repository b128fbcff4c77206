#include "base/thread.h"

#include <new>

namespace pyparallel {

Cause cause_of(const std::exception_ptr& thrown) noexcept {
  Cause cause;
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    cause.status = error.status();
    cause.named = true;
    try {
      cause.text = error.what();
    } catch (...) {  // no memory for the words: the status says it
    }
  } catch (const std::bad_alloc&) {
    cause.status = Status::no_memory;
    cause.text = "out of memory";  // fits into the string itself
  } catch (const std::exception& error) {
    try {
      cause.text = error.what();
    } catch (...) {
    }
  } catch (...) {
    cause.text = "unknown error";
  }
  return cause;
}

}  // namespace pyparallel
