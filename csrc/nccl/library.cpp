#include "nccl/library.h"

#include <dlfcn.h>

#include <mutex>

#include "base/error.h"
#include "nccl/error.h"
#include "nccl/probe.h"
#include "nccl/search.h"
#include "nccl/types.h"

namespace pyparallel::nccl {
namespace {

std::string loader_words() {
  const char* words = ::dlerror();
  return words != nullptr ? words : "the loader gives no reason";
}

std::string file_of(const void* address) {
  Dl_info info{};
  if (address == nullptr || ::dladdr(address, &info) == 0 || info.dli_fname == nullptr) return {};
  return resolved(info.dli_fname);
}

// A sanitizer's run time ends the process when it sees RTLD_DEEPBIND.
bool deep_binding_forbidden() {
  for (const char* mark : {"__asan_init", "__tsan_init", "__msan_init"}) {
    if (::dlsym(RTLD_DEFAULT, mark) != nullptr) return true;
  }
  return false;
}

constexpr const char* what_would_work =
    "install it (pip install nvidia-nccl-cu12, or -cu13 for CUDA 13) or name the file with "
    "PYPARALLEL_NCCL_LIB";

struct Process {
  std::mutex mutex;
  LoadOptions defaults;
  std::shared_ptr<const Library> library;
};

Process& process_state() {
  static auto* state = new Process;  // never destroyed: background threads outlive static objects
  return *state;
}

}  // namespace

const std::vector<SymbolInfo>& symbols() {
#define PYPARALLEL_NCCL_INFO(name, major, minor, patch, presence, result, parameters) \
  {"nccl" #name, version_code(major, minor, patch), presence},
  constexpr bool required = true, optional = false;
  static const std::vector<SymbolInfo> all = {PYPARALLEL_NCCL_SYMBOLS(PYPARALLEL_NCCL_INFO)};
#undef PYPARALLEL_NCCL_INFO
  return all;
}

std::shared_ptr<const Library> Library::open(const LoadOptions& options) {
  std::string looked_at;
  const std::vector<Candidate> candidates = find_library(options, &looked_at);
  std::shared_ptr<Library> library(new Library);
  void* handle = nullptr;
  std::string words;
  for (const Candidate& candidate : candidates) {
    handle = library->map(candidate, options, &words);
    if (handle != nullptr) break;
    // Only the loader's "there is no such file" sends the search on.
    const bool absent = words.rfind(candidate.name + ": cannot open shared object file", 0) == 0;
    if (candidate.is_file || !absent) break;
  }
  if (handle == nullptr) {
    throw Unsupported(
        str("NCCL from ", library->origin_, " (", library->path_, ") cannot be loaded: ", words,
            looked_at.empty() ? "" : "; also looked at: ", looked_at, "; ", what_would_work));
  }
  library->bind(handle);
  return library;
}

void* Library::map(const Candidate& candidate, const LoadOptions& options, std::string* words) {
  origin_ = candidate.origin;
  path_ = candidate.name;
  int flags = RTLD_NOW | RTLD_LOCAL;
  if (!candidate.mapped) {
    std::string fault = candidate.is_file ? truncation(path_) : std::string();
    if (fault.empty() && !options.probe_command.empty()) {
      fault = death_when_loading(options.probe_command, path_);
    }
    if (!fault.empty()) throw Unsupported(str("NCCL from ", origin_, " (", path_, "): ", fault));
    // Functions of these names that everyone sees would also catch the library's calls to itself.
    interposer_ = file_of(::dlsym(RTLD_DEFAULT, "ncclGetVersion"));
    deep_bound_ = !interposer_.empty() && !deep_binding_forbidden();
    if (deep_bound_) flags |= RTLD_DEEPBIND;
  }
  ::dlerror();
  void* handle = ::dlopen(path_.c_str(), flags);
  if (handle == nullptr) *words = loader_words();
  return handle;
}

void Library::bind(void* handle) {
  std::string absent, first_words;
  const auto find = [&](const char* name, bool required) {
    ::dlerror();
    void* address = ::dlsym(handle, name);
    if (address != nullptr) return address;
    if (!required) {
      missing_.emplace_back(name);
    } else {
      if (absent.empty()) first_words = loader_words();
      absent += (absent.empty() ? "" : ", ") + std::string(name);
    }
    return address;
  };
  constexpr bool required = true, optional = false;
#define PYPARALLEL_NCCL_FIND(name, major, minor, patch, presence, result, parameters) \
  functions_.name = reinterpret_cast<decltype(functions_.name)>(find("nccl" #name, presence));
  PYPARALLEL_NCCL_SYMBOLS(PYPARALLEL_NCCL_FIND)
#undef PYPARALLEL_NCCL_FIND
  static_cast<void>(optional);

  // dlsym also looks into what the library itself depends on; the file is where the function is.
  const void* anchor = reinterpret_cast<const void*>(functions_.GetVersion);
  if (const std::string file = file_of(anchor); !file.empty()) path_ = file;
  if (!absent.empty()) {
    throw Unsupported(str("NCCL from ", origin_, " (", path_,
                          ") lacks functions that no release is without: ", absent,
                          "; the loader says: ", first_words, "; ", what_would_work));
  }

  int version = 0;
  const Result result = functions_.GetVersion(&version);
  const Version parts = version_of(version);
  if (result != Result::success || version < version_code(2, 0, 0) || parts.major > 99) {
    throw Unsupported(str("NCCL from ", origin_, " (", path_, "): ncclGetVersion gives ",
                          nccl::name_of(result), " and ", version,
                          ", which is no version of NCCL 2 or later; ", what_would_work));
  }
  version_ = version;
}

void Library::set_default_options(const LoadOptions& options) {
  Process& process = process_state();
  const std::lock_guard<std::mutex> lock(process.mutex);
  process.defaults = options;
}

std::shared_ptr<const Library> Library::process(const LoadOptions& asked) {
  Process& process = process_state();
  const std::lock_guard<std::mutex> lock(process.mutex);
  if (process.library != nullptr) {
    PYPARALLEL_REQUIRE(asked.path.empty() || resolved(asked.path) == process.library->path(),
                       "asked for NCCL from ", asked.path, ", but this process already uses ",
                       process.library->describe(),
                       ": name the library in the first call, or with PYPARALLEL_NCCL_LIB");
    return process.library;
  }
  LoadOptions options = process.defaults;
  if (!asked.path.empty()) options.path = asked.path;
  if (!asked.wheel_folders.empty()) options.wheel_folders = asked.wheel_folders;
  if (!asked.probe_command.empty()) options.probe_command = asked.probe_command;
  process.library = open(options);
  return process.library;
}

void Library::require(bool present, const char* function) const {
  if (present) return;
  for (const SymbolInfo& symbol : symbols()) {
    if (std::string(symbol.name) == function) {
      throw Unsupported(str(function, " is needed, which came with NCCL ",
                            version_text(symbol.since), "; found ", describe()));
    }
  }
  throw Unsupported(str(function, " is needed; found ", describe()));
}

std::string Library::describe() const {
  return str("NCCL ", version_text(version_), " (", path_, ")");
}

}  // namespace pyparallel::nccl
