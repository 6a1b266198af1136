// Products of whole numbers with AVX2, also for AVX-512 without VNNI. Include outside of any namespace.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "formats.h"

namespace coldpress {
namespace {

// Sums of products of a block's codes and 32 whole numbers of 8 bits: 8 partial sums, exact.
template <Format F>
inline __m256i block_products(const uint8_t* block, const int8_t* x) {
    const auto load16 = [](const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); };
    if constexpr (F == Format::int4_group32) {
        const __m128i pairs = load16(block + 2), low = _mm_set1_epi8(15);
        const __m256i codes = _mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(pairs, 4), low), _mm_and_si128(pairs, low));
        const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
        // Codes are stored with 8 added. Sums of two products have at most 13 bits.
        const __m256i sums = _mm256_sub_epi16(_mm256_maddubs_epi16(codes, numbers),
                                              _mm256_maddubs_epi16(_mm256_set1_epi8(8), numbers));
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
