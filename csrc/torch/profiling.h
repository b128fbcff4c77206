// What torch's profilers are shown of calls: "pyparallel:all_reduce, group 0 (global ranks 0-3)".
// `python -m pyparallel profile` reads it (pyparallel/profile.py).
#pragma once

#include <string>

namespace pyparallel::dist {

// The title of a call of this group, which lives as long as the process; nullptr (and next to no
// time) where no profiler listens.
const char* profiled_title(const char* title, const std::string& group);

// From now on calls that keep their caller waiting are shown too, whoever makes them.
void show_calls_to_profilers();

}  // namespace pyparallel::dist
