// Products of whole numbers with AVX2, also for AVX-512 without VNNI. Include outside of any namespace.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "formats.h"
#include "kernels.h"

namespace coldpress {
namespace {

// Four bytes from each of eight places. Compilers build the same from numbers by way of memory, and wait for it.
inline __m256i eight_words(const uint8_t* p, int64_t stride) {
    const auto two = [=](int i) {
        return _mm_unpacklo_epi32(_mm_loadu_si32(p + i * stride), _mm_loadu_si32(p + (i + 1) * stride));
    };
    return _mm256_set_m128i(_mm_unpacklo_epi64(two(4), two(6)), _mm_unpacklo_epi64(two(0), two(2)));
}

// What kernels_blocks.h and kernels_integers.h ask of an instruction set with AVX2, but for the width of floats.
struct Bytes32 {
    using Bytes = __m256i;
    static constexpr int kSharing = 7;  // whose sums fit 16 registers beside what they share
    static Bytes field(const uint8_t* p, int shift, int mask) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        const __m256i shifted = shift < 0 ? _mm256_slli_epi16(bytes, -shift) : _mm256_srli_epi16(bytes, shift);
        return _mm256_and_si256(shifted, _mm256_set1_epi8(static_cast<char>(mask)));
    }
    static Bytes nibbles(const uint8_t* p) {
        const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), low = _mm_set1_epi8(15);
        return _mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(pairs, 4), low), _mm_and_si128(pairs, low));
    }
    static Bytes bits(const uint8_t* p, int place) {
        int32_t found;
        __builtin_memcpy(&found, p, sizeof found);
        const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        const __m256i own = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
        const __m256i bytes = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(found), places), own);
        return _mm256_and_si256(_mm256_cmpeq_epi8(bytes, own), _mm256_set1_epi8(static_cast<char>(1 << place)));
    }
    static Bytes joined(Bytes low, Bytes high) { return _mm256_or_si256(low, high); }
    static Bytes levels(Bytes codes) {
        const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kLevels));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
    }
    static float half(const uint8_t* p) {
        int16_t found;
        __builtin_memcpy(&found, p, sizeof found);
        return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(found)));
    }

    static void halves(const uint8_t* p, int64_t stride, float* out) {
        const __m256i places = _mm256_setr_epi64x(0x0D0C090805040100, -1, 0x0D0C090805040100, -1);
        const __m256i both = _mm256_shuffle_epi8(eight_words(p, stride), places);
        _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(both, 8))));
    }
    static void multiples(float unit, const uint32_t* words, int zero, float* out) {
        const __m128i bytes = _mm_cvtsi64_si128(static_cast<int64_t>(words[0] | static_cast<uint64_t>(words[1]) << 32));
        const __m256i numbers = _mm256_sub_epi32(_mm256_cvtepi8_epi32(bytes), _mm256_set1_epi32(zero));
        _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(numbers), _mm256_set1_ps(unit)));
    }

    using Ints = __m256i;
    // 8 partial sums, exact.
    static Ints products(const uint8_t* block, const int8_t* x) {
        const auto wide = [](const void* p) {
            return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
        };
        const auto half = [&](int at) { return _mm256_madd_epi16(wide(block + 2 + at), wide(x + at)); };
        return _mm256_add_epi32(half(0), half(16));
    }
    // Sums of products of 32 codes and numbers, in order over 8 lanes.
    template <Format F>
    static Ints code_products(Bytes codes, const int8_t* x) {
        const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)), one = _mm256_set1_epi16(1);
        if constexpr (F != Format::iq4_nl) return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, numbers), one);
        // No level is -128, whose sign cannot change, and the sum of two products fits 16 bits.
        const __m256i levels = _mm256_sign_epi8(codes, numbers);
        return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(numbers), levels), one);
    }
    static Ints join(Ints high, Ints low) { return _mm256_add_epi32(_mm256_slli_epi32(high, 8), low); }
    // Two planes become words of 16 bits: values 0 to 7 and 16 to 23, and the others.
    static void arrange(int8_t* high, int8_t* low) {
        const auto upper = reinterpret_cast<__m256i*>(high), lower = reinterpret_cast<__m256i*>(low);
        const __m256i bytes = _mm256_loadu_si256(upper), rest = _mm256_loadu_si256(lower), zero = _mm256_setzero_si256();
        const __m256i signs = _mm256_cmpgt_epi8(zero, rest);
        _mm256_storeu_si256(upper, _mm256_add_epi16(_mm256_unpacklo_epi8(zero, bytes), _mm256_unpacklo_epi8(rest, signs)));
        _mm256_storeu_si256(lower, _mm256_add_epi16(_mm256_unpackhi_epi8(zero, bytes), _mm256_unpackhi_epi8(rest, signs)));
    }
    template <Format F, int P>
    static Ints code_products(Bytes codes, const Rounded& x, int64_t at) {
        if constexpr (P == 1) return code_products<F>(codes, x.planes[0] + at);
        const __m256i zero = _mm256_setzero_si256(), signs = F == Format::iq4_nl ? _mm256_cmpgt_epi8(zero, codes) : zero;
        const auto words = [&](int plane) {
            return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x.planes[plane] + at));
        };
        return _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpacklo_epi8(codes, signs), words(0)),
                                _mm256_madd_epi16(_mm256_unpackhi_epi8(codes, signs), words(1)));
    }
    // The scale of each of 8 lanes.
    template <Format F>
    static __m256 of_groups(const float* scales) {
        if constexpr (layout_of(F).group == kBlock) return _mm256_set1_ps(scales[0]);
        return _mm256_set_m128(_mm_set1_ps(scales[1]), _mm_set1_ps(scales[0]));
    }
};

}  // namespace
}  // namespace coldpress
