// The inner loop of co-activation counts. Include outside of any namespace, after kernels.h.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>

#include "kernels.h"

namespace coldpress {
namespace {

inline void add_common_bits(const uint64_t* const* left, const uint64_t* const* right, int64_t count, int64_t* sums,
                            int64_t stride) {
    for (int j = 0; j < kBitRows; ++j) {
        int64_t found[kBitRows] = {}, w = 0;
#if defined(__AVX2__)
        const __m256i low = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
        const __m256i bits = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4,  // of each half byte
                                              0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
        const auto load = [](const uint64_t* words) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)); };
        __m256i lanes[kBitRows] = {zero, zero, zero, zero};
        for (; w + 4 <= count; w += 4)
            for (int i = 0; i < kBitRows; ++i) {
                const __m256i both = _mm256_and_si256(load(left[i] + w), load(right[j] + w));
                const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
                const __m256i each = _mm256_add_epi8(_mm256_shuffle_epi8(bits, _mm256_and_si256(both, low)),
                                                     _mm256_shuffle_epi8(bits, high));
                lanes[i] = _mm256_add_epi64(lanes[i], _mm256_sad_epu8(each, zero));
            }
        for (int i = 0; i < kBitRows; ++i) {
            int64_t stored[4];
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(stored), lanes[i]);
            found[i] = stored[0] + stored[1] + stored[2] + stored[3];
        }
#endif
        for (; w < count; ++w)
            for (int i = 0; i < kBitRows; ++i) found[i] += __builtin_popcountll(left[i][w] & right[j][w]);
        for (int i = 0; i < kBitRows; ++i) sums[i * stride + j] += found[i];
    }
}

}  // namespace
}  // namespace coldpress
