// AVX2 with FMA and F16C: x86-64 machines from 2013 on.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "integers_avx2.h"
#include "kernels.h"

namespace coldpress {
namespace {

struct Isa : Bytes32 {
    using V = __m256;
    static constexpr int kWidth = 8;

    static V zero() { return _mm256_setzero_ps(); }
    static V set1(float value) { return _mm256_set1_ps(value); }
    static V load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, V v) { _mm256_storeu_ps(p, v); }
    static V add(V a, V b) { return _mm256_add_ps(a, b); }
    static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
    static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
    static float sum(V v) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
    [[gnu::always_inline]] static void prefetch(const uint8_t* p) {
        _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
    }

    static __m128i load8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }

    template <Format F>
    static void unpack(const uint8_t* block, V* values) {
        if constexpr (F == Format::fp16) {
            for (int i = 0; i < 4; ++i)
                values[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 16 * i)));
        } else {
            for (int i = 0; i < 4; ++i) values[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load8(block + 2 + 8 * i)));
        }
    }
    static V scale(const uint8_t* block) {
        int16_t bits;
        __builtin_memcpy(&bits, block, sizeof bits);
        return _mm256_cvtph_ps(_mm_set1_epi16(bits));
    }

    static void widen(Bytes codes, V* values) {
        const __m128i halves[2] = {_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)};
        for (int i = 0; i < 4; ++i)
            values[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(i % 2 ? _mm_srli_si128(halves[i / 2], 8) : halves[i / 2]));
    }

    static V to_float(Ints sums) { return _mm256_cvtepi32_ps(sums); }
    template <Format F, int P>
    static V add_products(Bytes codes, const Rounded& x, int64_t at, const float* scales, V sum) {
        return fma(to_float(code_products<F, P>(codes, x, at)), of_groups<F>(scales), sum);
    }
};

}  // namespace
}  // namespace coldpress

#include "kernels_body.h"
#include "kernels_integers.h"
#include "kernels_activations.h"
#include "kernels_tokens.h"
#include "kernels_matrix.h"
#include "kernels_bits.h"

namespace coldpress {
const Kernels kAvx2Kernels{"avx2", dot, axpy, round_blocks, dot_rounded, decode, exp_sum, activate,
                           multiply, add_common_bits};
}
