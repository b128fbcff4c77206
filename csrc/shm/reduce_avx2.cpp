#if defined(__x86_64__)

#include <immintrin.h>

#define PYPARALLEL_VECTOR_BYTES 32
#include "shm/reduce_vectors.h"

#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile with -mavx2 -mf16c -ffp-contract=off"
#endif

namespace {

inline void stream(std::byte* aligned, Bytes raw) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(aligned), (__m256i)raw);
}

inline void stream_fence() { _mm_sfence(); }

struct Half {
  using V = Floats;
  static constexpr int parts = 2;
  static constexpr std::size_t element = 2;
  static void unpack(Bytes raw, V (&out)[2]) {
    out[0] = (V)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)raw));
    out[1] = (V)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)raw, 1));
  }
  static Bytes pack(const V (&in)[2]) {
    constexpr int nearest_even = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m128i low = _mm256_cvtps_ph((__m256)in[0], nearest_even);
    const __m128i high = _mm256_cvtps_ph((__m256)in[1], nearest_even);
    return (Bytes)_mm256_set_m128i(high, low);
  }
};

}  // namespace

#include "shm/reduce_template.h"

const pyparallel::shm::ReduceKernels pyparallel::shm::kernels_avx2 = {"avx2", reduce_any,
                                                                      copy_streamed};

#endif
