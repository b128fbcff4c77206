// What the tests ask of the stand-in itself: what was called, what is to fail.
#include "state.h"

using namespace standin;

extern "C" {

const char* standinLog() {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  static thread_local std::string copy;
  copy = tests().log;
  tests().log.clear();
  return copy.c_str();
}
const char* standinLastConfig() {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  static thread_local std::string copy;
  copy = tests().last_config;
  return copy.c_str();
}
// The next calls of that function give `code`; 0 ends it.
void standinSetResult(const char* function, int code) {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  tests().results[function] = static_cast<Result>(code);
  if (code == 0) tests().results.erase(function);
}
// All communicators of the process fail in the background.
void standinFailAsync(int code) {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  tests().last_error = "injected in the background";
  for (const auto& [raw, comm] : tests().comms) comm->state = code;
}
int standinAlive() {
  const std::lock_guard<std::mutex> lock(tests().mutex);
  return static_cast<int>(tests().comms.size());
}
// The version as the library's own calls to itself see it, through the table that others can
// change.
int standinVersionThroughTheTable() {
  int found = 0;
  ncclGetVersion(&found);
  return found;
}
void standinLetGo() { tests().let_go = true; }
}
