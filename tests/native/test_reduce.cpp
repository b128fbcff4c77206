// csrc/shm/reduce: every variant this CPU runs against the scalar reference, bit for bit.
// Arrays end where their allocation ends, so that AddressSanitizer sees a read past either end.

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "scalar_reference.h"
#include "shm/reduce_kernels.h"

using namespace pyparallel;
using namespace pyparallel::shm;

namespace {

std::mt19937_64 rng;

std::size_t below(std::size_t n) { return rng() % n; }

// `bytes` bytes that start `offset` past what malloc gives and end with their allocation.
struct Array {
  Array(std::size_t bytes, std::size_t offset)
      : memory(static_cast<std::byte*>(std::malloc(bytes + offset))),
        data(memory.get() + offset),
        bytes(bytes) {}
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> memory;
  std::byte* data;
  std::size_t bytes;
};

// Values of every kind: the whole range of bit patterns (so NaN, infinities, denormals), special
// ones more often, and plain numbers near 1 where sums lose few bits.
template <class Bits, class Float>
void fill_floats(std::byte* to, std::size_t count, std::initializer_list<Bits> special) {
  for (std::size_t i = 0; i < count; ++i) {
    Bits bits = static_cast<Bits>(rng());
    const std::size_t kind = below(8);
    if (kind == 0) {
      bits = special.begin()[below(special.size())] ^
             static_cast<Bits>(below(2) << (8 * sizeof(Bits) - 1));
    } else if (kind < 5) {
      if constexpr (std::is_floating_point_v<Float>) {
        const Float x = static_cast<Float>(std::uniform_real_distribution<double>(-2, 2)(rng));
        std::memcpy(&bits, &x, sizeof(x));
      } else {
        bits = Float::of(std::uniform_real_distribution<float>(-2, 2)(rng)).bits;
      }
    }
    std::memcpy(to + i * sizeof(Bits), &bits, sizeof(bits));
  }
}

void fill(Array& array, DType dtype) {
  const std::size_t count = array.bytes / size_of(dtype);
  switch (dtype) {
    case DType::f64:
      return fill_floats<std::uint64_t, double>(
          array.data, count, {0, 1, 0x7ff0000000000000, 0x7ff8000000000001, 0x7fefffffffffffff});
    case DType::f32:
      return fill_floats<std::uint32_t, float>(array.data, count,
                                               {0, 1, 0x7f800000, 0x7fc00001, 0x7f7fffff});
    case DType::f16:
      return fill_floats<std::uint16_t, reference::Float16>(
          array.data, count, {0, 1, 0x03ff, 0x0400, 0x7bff, 0x7c00, 0x7c01, 0x7e01});
    case DType::bf16:
      return fill_floats<std::uint16_t, reference::Bfloat16>(
          array.data, count, {0, 1, 0x007f, 0x0080, 0x7f7f, 0x7f80, 0x7f81, 0x7fc1});
    case DType::boolean:
      for (std::size_t i = 0; i < count; ++i) {
        array.data[i] = std::byte(below(3) == 0 ? rng() : below(2));
      }
      return;
    default:
      for (std::size_t i = 0; i < array.bytes; ++i) array.data[i] = std::byte(rng());
  }
}

Store any_store() { return below(2) == 0 ? Store::streamed : Store::cached; }

struct Case {
  DType dtype;
  ReduceOp op;
  int n;
  std::size_t count;
  bool aligned;  // else every array has an offset of its own, not a multiple of the element
  int alias;     // -1, or the input that is also the output
  bool second;   // also into second_out
  Store store, second_store;
};

// Runs the case on every variant; all must give the reference's bytes and touch nothing else.
void run(const Case& c, const std::vector<const ReduceKernels*>& variants) {
  const std::size_t bytes = c.count * size_of(c.dtype);
  const auto offset = [&] { return c.aligned ? std::size_t{0} : below(64); };
  std::vector<Array> inputs;
  std::vector<const void*> pointers;
  std::vector<double> factors;
  for (int k = 0; k < c.n; ++k) {
    inputs.emplace_back(bytes, offset());
    fill(inputs.back(), c.dtype);
    pointers.push_back(inputs.back().data);
    factors.push_back(std::uniform_real_distribution<double>(-3, 3)(rng));
  }
  Array expected(bytes, 0);
  ReduceArgs args;
  args.inputs = pointers.data();
  args.n = c.n;
  args.out = expected.data;
  args.count = c.count;
  args.dtype = c.dtype;
  args.op = c.op;
  args.factors = factors.data();
  args.divisor = c.n + static_cast<int>(below(300));
  args.store = c.store;
  args.second_store = c.second_store;
  reference::reduce(args);

  std::vector<std::byte> kept;
  if (c.alias >= 0) kept.assign(inputs[c.alias].data, inputs[c.alias].data + bytes);
  for (const ReduceKernels* variant : variants) {
    Array out(bytes, offset()), second(bytes, offset());
    std::fill_n(out.data, bytes, std::byte{0xa5});
    std::fill_n(second.data, bytes, std::byte{0xa5});
    args.out = c.alias >= 0 ? inputs[c.alias].data : out.data;
    args.second_out = c.second ? second.data : nullptr;
    variant->reduce(args);
    const auto* got = static_cast<const std::byte*>(args.out);
    std::size_t at = 0;
    while (at < bytes && got[at] == expected.data[at]) ++at;
    const auto where =
        str(variant->name, " ", name_of(c.op), " ", name_of(c.dtype), " n=", c.n,
            " count=", c.count, " alias=", c.alias, " second=", c.second,
            c.store == Store::streamed ? " streamed" : " cached", c.aligned ? "" : " unaligned");
    check::that(at == bytes, where, ": byte ", at, " is ", at < bytes ? int(got[at]) : 0,
                ", expected ", at < bytes ? int(expected.data[at]) : 0);
    if (c.second) {
      check::that(std::equal(got, got + bytes, second.data), where, ": second_out differs");
    }
    if (c.alias >= 0) std::copy(kept.begin(), kept.end(), inputs[c.alias].data);
  }
}
}  // namespace

#include "reduce_properties.h"

int main(int argc, char** argv) {
  rng = check::generator(argc, argv);
  std::vector<const ReduceKernels*> variants = {&kernels_portable};
#if defined(__x86_64__)
  // What reduce() would take is known to run here; so is what is older.
  const std::string best = simd_name();
  if (best != "portable") variants.push_back(&kernels_avx2);
  if (best == "avx512") variants.push_back(&kernels_avx512);
#endif
  for (const ReduceKernels* variant : variants) std::printf("variant %s\n", variant->name);

  for (int t = 0; t < int(DType::count_); ++t) {
    for (int o = 0; o < int(ReduceOp::count_); ++o) {
      const auto dtype = static_cast<DType>(t);
      const auto op = static_cast<ReduceOp>(o);
      if (!is_defined(op, dtype)) continue;
      for (std::size_t count = 0; count <= 300; ++count) {
        const int n =
            count % 5 == 0 ? 1 + static_cast<int>(below(17)) : 2 + static_cast<int>(below(4));
        run({dtype, op, n, count, below(2) == 0, below(3) == 0 ? static_cast<int>(below(n)) : -1,
             below(3) == 0, any_store(), any_store()},
            variants);
      }
      for (int n : {2, 3, 4, 5, 8, 9}) {
        run({dtype, op, n, 5000 + below(3000), below(2) == 0,
             below(3) == 0 ? static_cast<int>(below(n)) : -1, below(3) == 0, any_store(),
             any_store()},
            variants);
      }
    }
  }
  for (const ReduceKernels* variant : variants) {
    every_half(*variant);
    cuts(*variant);
    copies(*variant);
  }
  exact_sums();
  refusals();
  return check::finish("reduce");
}
