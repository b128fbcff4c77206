// For any CPU: the compiler lowers 16-byte vectors to what there is.
// compile with -ffp-contract=off
#define PYPARALLEL_VECTOR_BYTES 16
#include "shm/reduce_vectors.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

inline void stream(std::byte* aligned, Bytes raw) {
#if defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(aligned), (__m128i)raw);
#else
  std::memcpy(aligned, &raw, sizeof(raw));
#endif
}

inline void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// By integers, because the conversion instructions are not everywhere. No step makes or reads a
// denormal fp32, so it is right whatever the CPU's flush-to-zero mode, as the instructions are.
struct Half {
  using V = Floats;
  static constexpr int parts = 2;
  static constexpr std::size_t element = 2;

  static V widen(Words half) {  // the low 16 bits of each
    const Words sign = (half & 0x8000u) << 16;
    const Words magnitude = (half & 0x7fffu) << 13;
    const Words exponent = half & 0x7c00u;
    // 2^-14 + 2^-14 * fraction, minus 2^-14: the hardware normalises.
    const Words small = (Words)((V)(magnitude + (113u << 23)) - (V)splat<Words>(113u << 23));
    const Words normal = magnitude + (112u << 23);
    const Words special = magnitude | 0x7f800000u;
    return (V)(sign | (exponent == 0x7c00u ? special : exponent == 0u ? small : normal));
  }

  static Words narrow(V x) {
    const Words bits = (Words)x;
    const Words sign = (bits >> 16) & 0x8000u;
    const Words magnitude = bits & 0x7fffffffu;
    // Below 2^-14: added to 0.5 the fraction of a denormal ends at bit 0, rounded to nearest even.
    const Words small = (Words)((V)magnitude + (V)splat<Words>(126u << 23)) - (126u << 23);
    const Words normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const Words special = magnitude > 0x7f800000u ? splat<Words>(0x7e00u) : splat<Words>(0x7c00u);
    return sign | (magnitude >= (143u << 23) ? special : magnitude < (113u << 23) ? small : normal);
  }

  static void unpack(Bytes raw, V (&out)[2]) {
    out[0] = widen((Words)raw & 0xffffu);
    out[1] = widen((Words)raw >> 16);
  }
  static Bytes pack(const V (&in)[2]) { return (Bytes)(narrow(in[0]) | (narrow(in[1]) << 16)); }
};

}  // namespace

#include "shm/reduce_template.h"

const pyparallel::shm::ReduceKernels pyparallel::shm::kernels_portable = {"portable", reduce_any,
                                                                          copy_streamed};
