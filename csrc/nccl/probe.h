// Whether a file can be opened as a library without harm to the process that does it.
#pragma once

#include <string>
#include <vector>

namespace pyparallel::nccl {

// Empty when `path` is no ELF file (the loader will say so in its own words) or holds all the bytes
// that its headers promise, else what is missing. A loader that maps a file which is shorter than
// its headers say is killed by SIGBUS.
std::string truncation(const std::string& path);

// Runs `command` with `path` as its last argument, for ten seconds at most. Empty when it ended by
// itself, whatever its exit status, else how it died. Throws SystemError when it cannot be started.
std::string death_when_loading(const std::vector<std::string>& command, const std::string& path);

}  // namespace pyparallel::nccl
