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
        } else if constexpr (F == Format::int8_group32) {
            for (int i = 0; i < 4; ++i) values[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load8(block + 2 + 8 * i)));
        } else if constexpr (codes_of(F).bits < 4) {
            // Each 32-bit lane j holds a byte whose bits 2 k and 2 k + 1 are the low bits of value 8 k + j, and another
            // one whose bit 2 k is the high bit. vpermilps uses only the low two bits of each lane: one lookup turns them
            // into a level and converts. The high bit, moved to the sign, chooses between two tables: vpermps would do
            // with one, but takes two to four times as long on AMD.
            const auto levels = [](int first) {
                const float level = static_cast<float>(first - codes_of(F).zero);
                const __m128 four = _mm_setr_ps(level, level + 1, level + 2, level + 3);
                return _mm256_set_m128(four, four);
            };
            const __m256i low = _mm256_cvtepu8_epi32(load8(block + 2));
            const __m256i high = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(spread_bits(block + 10)));
            for (int k = 0; k < 4; ++k) {
                const __m256i codes = _mm256_srli_epi32(low, 2 * k);
                const __m256 chosen = _mm256_castsi256_ps(_mm256_slli_epi32(high, 31 - 2 * k));
                values[k] = _mm256_blendv_ps(_mm256_permutevar_ps(levels(0), codes),
                                             _mm256_permutevar_ps(levels(4), codes), chosen);
            }
        } else {
            const __m256i low = _mm256_set1_epi32(15), zero = _mm256_set1_epi32(codes_of(F).zero);
            const auto levels = [&](__m256i codes) { return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, zero)); };
            for (int i = 0; i < 2; ++i) {  // each 32-bit lane holds one byte: two values, 16 places apart
                const __m256i pairs = _mm256_cvtepu8_epi32(load8(block + 2 + 8 * i));
                values[i] = levels(_mm256_and_si256(pairs, low));
                values[i + 2] = levels(_mm256_srli_epi32(pairs, 4));
            }
        }
    }
    template <Format F>
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

    template <Format F>
    static Ints products(const uint8_t* block, const int8_t* x) {
        return block_products<F>(block, x);
    }
    static V to_float(Ints sums) { return _mm256_cvtepi32_ps(sums); }
    template <Format F, int P>
    static V add_products(Bytes codes, const Rounded& x, int64_t at, const float* scales, V sum) {
        return fma(to_float(code_products<F, P>(codes, x, at)), of_groups<F>(scales), sum);
    }
};

}  // namespace
}  // namespace coldpress

#include "kernels_chunks.h"
#include "kernels_body.h"
#include "kernels_integers.h"
#include "kernels_activations.h"
#include "kernels_tokens.h"
#include "kernels_matrix.h"

namespace coldpress {
const Kernels kAvx2Kernels{"avx2", arrange, restore, dot, axpy, round_blocks, dot_rounded, decode, exp_sum, activate,
                               dot_tokens, axpy_tokens, multiply, decode_panels};
}
