// emulation --list: the names of all cases. emulation NAME...: runs them; status 1 if one fails.
#include <cstdio>

#include "check.h"

int main(int argc, char** argv) {
  using namespace pyparallel::cuda::emulation;
  Cases cases;
  add_data_cases(cases);
  add_protocol_cases(cases);
  add_fault_cases(cases);
  add_choice_cases(cases);
  int failed = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--list") {
      for (const auto& entry : cases) std::printf("%s\n", entry.first.c_str());
      continue;
    }
    const auto found = cases.find(name);
    if (found == cases.end()) {
      std::fprintf(stderr, "no case %s\n", name.c_str());
      return 2;
    }
    try {
      found->second();
      std::printf("%s: passed\n", name.c_str());
    } catch (const std::exception& e) {
      std::printf("%s: FAILED: %s\n", name.c_str(), e.what());
      failed = 1;
    }
  }
  return failed;
}
