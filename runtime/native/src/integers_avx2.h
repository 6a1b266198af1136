// Products of whole numbers with AVX2, also for AVX-512 without VNNI. Include outside of any namespace.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "formats.h"

namespace coldpress {
namespace {

// The high bits of a block with three bits, four bytes: bit 2 k of byte j is that of value 8 k + j.
inline int64_t spread_bits(const uint8_t* p) {
    uint32_t bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return static_cast<int64_t>(bits) | static_cast<int64_t>(bits >> 1) << 32;
}

// The codes of a block, in order, as bytes. With two bits, lane k of 64 bits holds values 8 k to 8 k + 7: bits 2 k and
// 2 k + 1 of the eight bytes.
template <int kBits>
inline __m256i unpacked_codes(const uint8_t* block) {
    if constexpr (kBits == 4) {
        const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 2)), low = _mm_set1_epi8(15);
        return _mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(pairs, 4), low), _mm_and_si128(pairs, low));
    }
    int64_t low;
    __builtin_memcpy(&low, block + 2, sizeof low);
    const __m256i shifts = _mm256_setr_epi64x(0, 2, 4, 6);
    const __m256i lows = _mm256_and_si256(_mm256_srlv_epi64(_mm256_set1_epi64x(low), shifts), _mm256_set1_epi8(3));
    if constexpr (kBits == 2) return lows;
    const __m256i twice = _mm256_set1_epi64x(spread_bits(block + 10));
    const __m256i highs = _mm256_and_si256(_mm256_srlv_epi64(twice, shifts), _mm256_set1_epi8(1));
    return _mm256_or_si256(lows, _mm256_slli_epi16(highs, 2));
}

// Codes times a format's step, a power of two; both fit a byte.
template <Format F>
inline __m256i stepped_codes(const uint8_t* block) {
    constexpr Codes kCodes = codes_of(F);
    const __m256i codes = unpacked_codes<kCodes.bits>(block);
    return kCodes.step == 1 ? codes : _mm256_slli_epi16(codes, __builtin_ctz(kCodes.step));
}

// Sums of products of a block's codes and 32 whole numbers of 8 bits: 8 partial sums, exact.
template <Format F>
inline __m256i block_products(const uint8_t* block, const int8_t* x) {
    const auto load16 = [](const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); };
    if constexpr (codes_of(F).bits > 0) {
        const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
        // Sums of two products have at most 14 bits.
        const __m256i zeros = _mm256_set1_epi8(codes_of(F).zero);
        const __m256i sums = _mm256_sub_epi16(_mm256_maddubs_epi16(stepped_codes<F>(block), numbers),
                                              _mm256_maddubs_epi16(zeros, numbers));
        return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
    } else {
        const auto half = [&](int at) {
            return _mm256_madd_epi16(_mm256_cvtepi8_epi16(load16(block + 2 + at)), _mm256_cvtepi8_epi16(load16(x + at)));
        };
        return _mm256_add_epi32(half(0), half(16));
    }
}

}  // namespace
}  // namespace coldpress
