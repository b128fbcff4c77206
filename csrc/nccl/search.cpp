#include "nccl/search.h"

#include <link.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "base/error.h"

namespace pyparallel::nccl {
namespace {

constexpr const char* file_name = "libnccl.so.2";
constexpr const char* deleted_mark = " (deleted)";

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

std::string from_environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

// The names under which the loader knows the objects of this process: opening one of them gives
// that very object, even when its file has been replaced.
std::vector<std::string> loaded_names() {
  std::vector<std::string> names;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {
        if (info->dlpi_name != nullptr && is_nccl_file(info->dlpi_name)) {
          static_cast<std::vector<std::string>*>(out)->emplace_back(info->dlpi_name);
        }
        return 0;
      },
      &names);
  return names;
}

}  // namespace

std::string resolved(const std::string& path) {
  char* real = ::realpath(path.c_str(), nullptr);
  if (real == nullptr) return path;
  std::string result(real);
  std::free(real);
  return result;
}

bool is_nccl_file(const std::string& path) {
  const std::string base = path.substr(path.find_last_of('/') + 1);
  return base.rfind("libnccl.so", 0) == 0 || base.rfind("librccl.so", 0) == 0;
}

std::vector<LoadedCopy> loaded_copies(const std::string& our_path) {
  std::vector<LoadedCopy> copies;
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    const std::size_t start = line.find('/');
    if (start == std::string::npos) continue;
    LoadedCopy copy;
    copy.path = line.substr(start);
    const std::size_t mark = copy.path.rfind(deleted_mark);
    copy.deleted = mark != std::string::npos;
    if (copy.deleted) copy.path.resize(mark);
    copy.ours = copy.path == our_path;
    if (!copy.ours && !is_nccl_file(copy.path)) continue;
    bool known = false;
    for (const LoadedCopy& other : copies) {
      known = known || (other.path == copy.path && other.deleted == copy.deleted);
    }
    if (!known) copies.push_back(copy);
  }
  return copies;
}

std::vector<Candidate> find_library(const LoadOptions& options, std::string* looked_at) {
  const auto order = [](const std::string& name, const char* origin) {
    Candidate candidate{name, origin, false, name.find('/') != std::string::npos};
    for (const LoadedCopy& copy : loaded_copies("")) {
      candidate.mapped = candidate.mapped || (!copy.deleted && copy.path == resolved(name));
    }
    return std::vector<Candidate>{candidate};
  };
  if (!options.path.empty()) return order(options.path, "the path argument");
  const std::string named = from_environment("PYPARALLEL_NCCL_LIB");
  if (!named.empty()) return order(named, "PYPARALLEL_NCCL_LIB");

  if (const auto names = loaded_names(); !names.empty()) {
    return {{names.front(), "the copy that this process had loaded", true, true}};
  }

  const auto note = [&](const std::string& place) {
    *looked_at += (looked_at->empty() ? "" : ", ") + place;
  };
  for (const std::string& folder : options.wheel_folders) {
    const std::string path = folder + "/nvidia/nccl/lib/" + file_name;
    if (exists(path)) return {{path, "the nvidia-nccl wheel", false, true}};
  }
  if (!options.wheel_folders.empty()) {
    note(str("nvidia/nccl/lib/", file_name, " in ", options.wheel_folders.size(),
             " folders of Python packages"));
  }
  if (const std::string conda = from_environment("CONDA_PREFIX"); !conda.empty()) {
    const std::string path = conda + "/lib/" + file_name;
    if (exists(path)) return {{path, "CONDA_PREFIX", false, true}};
    note(path);
  }
  std::vector<Candidate> candidates = {{file_name, "the dynamic loader", false, false}};
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    const std::string home = from_environment(variable);
    if (home.empty()) continue;
    for (const char* folder : {"/lib64/", "/lib/"}) {
      const std::string path = home + folder + file_name;
      if (exists(path)) {
        candidates.push_back({path, variable, false, true});
      } else {
        note(path);
      }
    }
  }
  return candidates;
}

}  // namespace pyparallel::nccl
