// AVX-512 (F, BW, VL, DQ) operations on vectors of 16 floats, for the sources that are compiled for it.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "integers_avx2.h"
#include "kernels.h"

namespace coldpress {
namespace {

struct Isa : Bytes32 {
    using V = __m512;
    static constexpr int kWidth = 16;

    static V zero() { return _mm512_setzero_ps(); }
    static V set1(float value) { return _mm512_set1_ps(value); }
    static V load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
    static V add(V a, V b) { return _mm512_add_ps(a, b); }
    static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
    static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
    static float sum(V v) { return _mm512_reduce_add_ps(v); }
    [[gnu::always_inline]] static void prefetch(const uint8_t* p) {
        _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
    }

    static __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

    template <Format F>
    static void unpack(const uint8_t* block, V* values) {
        if constexpr (F == Format::fp16) {
            for (int i = 0; i < 2; ++i)
                values[i] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 32 * i)));
        } else {
            for (int i = 0; i < 2; ++i)
                values[i] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(block + 2 + 16 * i)));
        }
    }
    static V scale(const uint8_t* block) {
        int16_t bits;
        __builtin_memcpy(&bits, block, sizeof bits);
        return _mm512_cvtph_ps(_mm256_set1_epi16(bits));
    }

    static void widen(Bytes codes, V* values) {
        values[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
        values[1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
    }

    static V to_float(Ints sums) { return _mm512_zextps256_ps512(_mm256_cvtepi32_ps(sums)); }
    template <Format F, int P>
    static V add_products(Bytes codes, const Rounded& x, int64_t at, const float* scales, V sum) {
        return fma(to_float(code_products<F, P>(codes, x, at)), _mm512_zextps256_ps512(of_groups<F>(scales)), sum);
    }
};

}  // namespace
}  // namespace coldpress
