// NCCL found at run time, never linked. Where it is looked for, in this order:
//   1 the path the caller names        2 PYPARALLEL_NCCL_LIB       3 a copy this process has mapped
//   4 the nvidia-nccl wheel            5 $CONDA_PREFIX/lib         6 the dynamic loader
//   7 CUDA_HOME, CUDA_PATH
// 1 and 2 are orders: what they name is used or the error says why not. Of the others the first
// that exists is used; one that exists and cannot be loaded is an error too, not a reason to go on.
// The library is opened RTLD_NOW | RTLD_LOCAL and never closed, so that it cannot satisfy (or
// spoil) the symbols of anyone else.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nccl/symbols.h"

namespace pyparallel::nccl {

struct LoadOptions {
  std::string path;  // of the library; empty: search
  // Folders that may hold nvidia/nccl/lib/libnccl.so.2 (Python's site-packages).
  std::vector<std::string> wheel_folders;
  // A program that opens the file it gets as its last argument and exits. Run before a file that
  // this process has not mapped is opened here, so that a file that kills whoever loads it
  // (damaged, built for another processor) is an error message. Empty: only the file's own headers
  // are checked.
  std::vector<std::string> probe_command;
};

// One libnccl in this process's memory.
struct LoadedCopy {
  std::string path;
  bool ours = false;     // the one this binding calls
  bool deleted = false;  // its file has been replaced or removed since
};

struct Candidate;

class Library {
 public:
  // Throws Unsupported: every place looked at with what was found there and the loader's own words.
  static std::shared_ptr<const Library> open(const LoadOptions& options);

  // The process's library: opened with `options` by the first call, the same object ever after.
  // Throws InvalidArgument when a later call names another path.
  static std::shared_ptr<const Library> process(const LoadOptions& options = {});
  // Options for process() when it is called without any: Python sets them when it is imported.
  static void set_default_options(const LoadOptions& options);

  const Functions& functions() const { return functions_; }
  const Functions* operator->() const { return &functions_; }
  const std::string& path() const { return path_; }      // of the file, symbolic links resolved
  const std::string& origin() const { return origin_; }  // which place of the search it came from
  int version() const { return version_; }
  const std::vector<std::string>& missing() const { return missing_; }  // optional functions
  // Empty, or the file whose functions of the same names take precedence in the process; the
  // library was then opened with RTLD_DEEPBIND, so that its calls to itself stay its own.
  const std::string& interposer() const { return interposer_; }
  bool deep_bound() const { return deep_bound_; }

  // Throws Unsupported unless `present`: names the function, its first release, and what was found.
  void require(bool present, const char* function) const;
  // "NCCL 2.27.3 (/usr/lib/libnccl.so.2)"
  std::string describe() const;

 private:
  Library() = default;
  void* map(const Candidate& candidate, const LoadOptions& options, std::string* words);
  void bind(void* handle);  // all functions of the list, and the version
  Functions functions_;
  std::string path_, origin_, interposer_;
  int version_ = 0;
  bool deep_bound_ = false;
  std::vector<std::string> missing_;
};

// Every copy of NCCL that is mapped into this process now, by anyone.
std::vector<LoadedCopy> loaded_copies(const std::string& our_path);

struct SymbolInfo {
  const char* name;  // "ncclAllReduce"
  int since;         // version code
  bool required;
};
const std::vector<SymbolInfo>& symbols();

}  // namespace pyparallel::nccl

// Checks that an optional function is there: PYPARALLEL_NCCL_NEED(library, CommSplit).
#define PYPARALLEL_NCCL_NEED(library, name) \
  (library).require((library)->name != nullptr, "nccl" #name)
