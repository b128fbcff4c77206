#include "cuda/loader.h"

#include <dlfcn.h>

#include <cstdlib>

#include "base/error.h"

namespace pyparallel::cuda {

namespace {

constexpr const char* kFile = "libpyparallel_cuda.so";
constexpr const char* kVariable = "PYPARALLEL_CUDA_LIB";

std::string beside_this_library() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&request_abort), &info) == 0) return kFile;
  const std::string self = info.dli_fname;
  const std::size_t slash = self.rfind('/');
  return slash == std::string::npos ? kFile : self.substr(0, slash + 1) + kFile;
}

std::string path_of_kernels() {
  const char* named = std::getenv(kVariable);
  return named != nullptr && *named != '\0' ? named : beside_this_library();
}

void check(const KernelTable& table, int error, const std::string& asked) {
  if (error != 0)
    throw CudaError(str(asked, ": ", table.error_text(error), " (CUDA error ", error, ")"));
}

}  // namespace

Kernels::Kernels(const std::string& path) : path_(path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Unsupported(
        str("CUDA kernels: ", dlerror(),
            ". They are built where nvcc is found (PYPARALLEL_CUDA=1 requires them); ", kVariable,
            " names another file."));
  }
  using Entry = const KernelTable* (*)();
  const auto entry = reinterpret_cast<Entry>(dlsym(library, "pyparallel_cuda_kernels"));
  if (entry == nullptr)
    throw Unsupported(str("CUDA kernels: ", path, " is another library: ", dlerror()));
  table_ = entry();
  if (table_->version != KernelTable::current_version || table_->call_bytes != sizeof(Call)) {
    throw Unsupported(str("CUDA kernels: ", path, " has interface ", table_->version, " (",
                          table_->call_bytes, " bytes per call), this library needs ",
                          KernelTable::current_version, " (", sizeof(Call),
                          "): build both from one source tree"));
  }
}

const Kernels& Kernels::get() {
  static const Kernels kernels(path_of_kernels());
  return kernels;
}

std::string Kernels::unavailable() noexcept {
  try {
    get().current_device();
    return "";
  } catch (const std::exception& e) {
    return e.what();
  }
}

void Kernels::launch(const Request& request, const Seat& seat, void* stream) const {
  if (const std::string why = request_misfit(request, seat); !why.empty())
    throw InvalidArgument(why);
  const auto start = [&](const Call& call, Grid grid) {
    return table_->launch(call, request.dtype, grid, stream);
  };
  check(*table_, for_each_call(request, seat, start),
        str(name_of(request.op), ", rank ", seat.rank, " of ", seat.layout.world));
}

void Kernels::prepare() const {
  check(*table_, table_->prepare(), "CUDA kernels: loading them onto the current device");
}

Device Kernels::current_device() const {
  Device device{};
  check(*table_, table_->current_device(&device), "CUDA kernels: asking for the current device");
  return device;
}

std::string describe_failure(const StatusPage& page, const std::string& group) {
  const auto state = __atomic_load_n(&page.state, __ATOMIC_ACQUIRE);
  if (state == StatusPage::ok) return "";
  const Op op = static_cast<Op>(page.op);
  const double seconds = static_cast<double>(page.waited_ns) * 1e-9;
  const std::string where =
      str(name_of(op), " #", page.call, ", group ", group, ", rank ", page.rank);
  const auto seen_call = static_cast<std::uint32_t>(page.seen >> 32);
  const auto signature = [](std::uint64_t word) {
    return describe_signature(static_cast<std::uint32_t>(word));
  };
  if (op == Op::wait_signal) {
    return str(where, ": ", state == StatusPage::aborted ? "aborted" : "signal absent", " after ",
               seconds, " s; counter ", page.seen, ", expected ", page.expected);
  }
  const std::string at = str("block ", page.block, ", round ", page.round);
  switch (state) {
    case StatusPage::timeout:
      return str(
          where, ": rank ", page.peer, " absent after ", seconds, " s (", at,
          "); its last call is #", seen_call, ", expected #", page.call,
          ". The workspace is unusable from now on; make a new one when all ranks are back.");
    case StatusPage::mismatch:
      return str(
          where, ": rank ", page.peer, " calls ", signature(page.seen), "; this rank calls ",
          signature(page.expected), " (", at,
          "). All ranks must make the same call with the same sizes, grid and workspace layout.");
    default:
      return str(where, ": aborted by the host while waiting for rank ", page.peer, " (", at,
                 ") after ", seconds, " s");
  }
}

void raise_failure(const StatusPage& page, const std::string& group) {
  const std::string text = describe_failure(page, group);
  if (text.empty()) return;
  switch (__atomic_load_n(&page.state, __ATOMIC_ACQUIRE)) {
    case StatusPage::timeout:
      throw Timeout(text);
    case StatusPage::mismatch:
      throw Mismatch(text);
    default:
      throw Aborted(text);
  }
}

void request_abort(StatusPage& page) noexcept {
  __atomic_store_n(&page.abort, 1u, __ATOMIC_RELEASE);
}

}  // namespace pyparallel::cuda
