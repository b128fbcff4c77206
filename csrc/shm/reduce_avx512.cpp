#if defined(__x86_64__)

// GCC 12's own header leaves don't-care lanes uninitialised and then warns of it.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#define PYPARALLEL_VECTOR_BYTES 64
#include "shm/reduce_vectors.h"

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || \
    !defined(__AVX512VL__)
#error "compile with -mavx512f -mavx512bw -mavx512dq -mavx512vl -ffp-contract=off"
#endif

namespace {

inline void stream(std::byte* aligned, Bytes raw) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(aligned), (__m512i)raw);
}

inline void stream_fence() { _mm_sfence(); }

struct Half {
  using V = Floats;
  static constexpr int parts = 2;
  static constexpr std::size_t element = 2;
  static void unpack(Bytes raw, V (&out)[2]) {
    out[0] = (V)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)raw));
    out[1] = (V)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)raw, 1));
  }
  static Bytes pack(const V (&in)[2]) {
    constexpr int nearest_even = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m256i low = _mm512_cvtps_ph((__m512)in[0], nearest_even);
    const __m256i high = _mm512_cvtps_ph((__m512)in[1], nearest_even);
    return (Bytes)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
};

}  // namespace

#include "shm/reduce_template.h"

const pyparallel::shm::ReduceKernels pyparallel::shm::kernels_avx512 = {"avx512", reduce_any,
                                                                        copy_streamed};

#endif
