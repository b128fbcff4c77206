#include "shm/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdint>
#include <cstring>
#include <string>

#include "base/env.h"
#include "base/error.h"
#include "shm/reduce_kernels.h"

namespace pyparallel::shm {
namespace {

struct Features {
  bool avx2 = false;    // with F16C
  bool avx512 = false;  // F, BW, DQ, VL
};

// What both the CPU and the operating system (which must save the registers) support.
Features features() {
  Features found;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  constexpr unsigned os_saves = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
  if ((c & os_saves) == 0 || (c & avx) == 0 || (c & f16c) == 0) return found;
  std::uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr std::uint32_t ymm = 0x6, zmm = 0xe6;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  constexpr unsigned avx2 = 1u << 5;
  constexpr unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  found.avx2 = (b & avx2) != 0 && (low & ymm) == ymm;
  found.avx512 = found.avx2 && (b & avx512) == avx512 && (low & zmm) == zmm;
#endif
  return found;
}

const ReduceKernels& choose() {
  const Features cpu = features();
  const std::string want = env::simd();
#if defined(__x86_64__)
  if ((want.empty() || want == "avx512") && cpu.avx512) return kernels_avx512;
  if ((want.empty() || want == "avx2") && cpu.avx2) return kernels_avx2;
#endif
  if (want.empty() || want == "portable") return kernels_portable;
  throw InvalidArgument(str("PYPARALLEL_SIMD=", want, ": this CPU runs ",
                            cpu.avx512 ? "avx512, avx2 and portable"
                            : cpu.avx2 ? "avx2 and portable"
                                       : "portable",
                            "; unset it to take the first"));
}

const ReduceKernels& kernels() {
  static const ReduceKernels& chosen = choose();
  return chosen;
}

}  // namespace

void reduce(const ReduceArgs& args) {
  PYPARALLEL_REQUIRE(is_defined(args.op, args.dtype), "reduce: ", name_of(args.op),
                     " is not defined on ", name_of(args.dtype));
  PYPARALLEL_REQUIRE(args.n >= 1, "reduce: ", args.n, " inputs; at least 1 is needed");
  PYPARALLEL_REQUIRE(args.op != ReduceOp::avg || args.divisor >= 1, "reduce: avg by ", args.divisor,
                     "; the divisor is the number of ranks");
  PYPARALLEL_REQUIRE(args.op != ReduceOp::premul_sum || args.factors,
                     "reduce: premul_sum needs one factor per input");
  if (args.count == 0) return;
  kernels().reduce(args);
}

void copy(void* out, const void* in, std::size_t bytes, Store store) {
  if (bytes == 0 || out == in) return;
  if (store == Store::streamed) {
    kernels().copy_streamed(out, in, bytes);
  } else {
    std::memcpy(out, in, bytes);
  }
}

const char* simd_name() { return kernels().name; }

}  // namespace pyparallel::shm
