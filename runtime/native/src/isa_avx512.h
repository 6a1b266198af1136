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
        } else if constexpr (F == Format::int8_group32) {
            for (int i = 0; i < 2; ++i)
                values[i] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(block + 2 + 16 * i)));
        } else {
            const __m512 codes_in_order = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            const __m512 table = _mm512_sub_ps(codes_in_order, set1(codes_of(F).zero));
            if constexpr (codes_of(F).bits < 4) {
                const __m256i codes = unpacked_codes<codes_of(F).bits>(block);
                values[0] = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(codes)), table);
                values[1] = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(codes, 1)), table);
                return;
            }
            // vpermps uses only the low four bits of each lane: one lookup masks, turns a code into a level and converts.
            const __m512i pairs = _mm512_cvtepu8_epi32(load16(block + 2));
            values[0] = _mm512_permutexvar_ps(pairs, table);
            values[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), table);
        }
    }
    template <Format F>
    static V scale(const uint8_t* block) {
        int16_t bits;
        __builtin_memcpy(&bits, block, sizeof bits);
        return _mm512_cvtph_ps(_mm256_set1_epi16(bits));
    }

    static void widen(Bytes codes, V* values) {
        values[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
        values[1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
    }

    template <Format F>
    static Ints products(const uint8_t* block, const int8_t* x) {
        return block_products<F>(block, x);
    }
    static V to_float(Ints sums) { return _mm512_zextps256_ps512(_mm256_cvtepi32_ps(sums)); }
    template <Format F, int P>
    static V add_products(Bytes codes, const Rounded& x, int64_t at, const float* scales, V sum) {
        return fma(to_float(code_products<F, P>(codes, x, at)), _mm512_zextps256_ps512(of_groups<F>(scales)), sum);
    }
};

// The codes of four consecutive blocks of int4: each block has a quarter of the lanes.
inline __m512i codes_of_four(const uint8_t* blocks) {
    // Words of 64 bytes that begin with the first scale, and the last block's last 8 bytes behind them.
    const __m512i places = _mm512_set_epi16(0, 0, 0, 0, 31, 30, 29, 28, 26, 25, 24, 23, 22, 21, 20, 19, 17, 16, 15, 14,
                                            13, 12, 11, 10, 8, 7, 6, 5, 4, 3, 2, 1);
    const __m512i most = _mm512_permutexvar_epi16(places, _mm512_loadu_si512(blocks));
    return _mm512_mask_loadu_epi64(most, 0x80, blocks + 8);
}

// The scales of the four blocks, each in its block's lanes.
inline __m512 scales_of_four(const uint8_t* blocks) {
    const __m512i places = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 27, 27, 27, 27, 18, 18, 18,
                                            18, 9, 9, 9, 9, 0, 0, 0, 0);
    const __m512i halves = _mm512_permutexvar_epi16(places, _mm512_loadu_si512(blocks));
    return _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
}

}  // namespace
}  // namespace coldpress
