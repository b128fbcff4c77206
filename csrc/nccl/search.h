// Where NCCL may be: the places of library.h, looked at in their order.
#pragma once

#include <string>
#include <vector>

#include "nccl/library.h"

namespace pyparallel::nccl {

struct Candidate {
  std::string name;     // what to give the loader: a path, or a bare name for it to look up
  std::string origin;   // "the nvidia-nccl wheel"
  bool mapped = false;  // already in this process
  bool is_file = false;
};

// What to open, best first: never empty. More than one only where the loader must be asked, which
// can be done by opening alone. `looked_at` gets the places that had nothing.
std::vector<Candidate> find_library(const LoadOptions& options, std::string* looked_at);

// The path without symbolic links; itself when it does not exist.
std::string resolved(const std::string& path);

// Whether a mapped file of that name is NCCL or RCCL (and not a plug-in of it).
bool is_nccl_file(const std::string& path);

}  // namespace pyparallel::nccl
