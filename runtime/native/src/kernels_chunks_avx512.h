// Four blocks of int4 at a time with AVX-512: each lane of 32 bits holds eight of their values and each block has four
// lanes, so that nothing is widened and the scales are fetched at once. Behind kernels_chunks.h.

namespace coldpress {
namespace {

template <>
struct Chunk<Format::int4_group32> {
    static constexpr int64_t kBlocks = 4;
    static constexpr int kVectors = 8;

    static void unpack(const uint8_t* chunk, V* values) {
        // vpermps looks at the low four bits of each lane only: it is the mask, the -8 and the conversion in one.
        const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        const __m512i codes = codes_of_four(chunk);
        values[0] = _mm512_permutexvar_ps(codes, table);
#pragma GCC unroll 8
        for (int v = 1; v < kVectors; ++v) values[v] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * v), table);
    }
    static V scale(const uint8_t* chunk) { return scales_of_four(chunk); }

    // Vector 2 b + h has in lane 4 m + j what block m has at 16 h + 4 j + b.
    static void arrange(const float* x, float* out) {
        const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 32, 36, 40, 44, 64, 68, 72, 76, 96, 100, 104, 108);
        for (int v = 0; v < kVectors; ++v)
            _mm512_storeu_ps(out + 16 * v, _mm512_i32gather_ps(first, x + v / 2 + v % 2 * 16, sizeof(float)));
    }
    static void restore(const float* arranged, float* out) {
        const __m512i first = _mm512_setr_epi32(0, 32, 64, 96, 1, 33, 65, 97, 2, 34, 66, 98, 3, 35, 67, 99);
        for (int v = 0; v < kVectors; ++v) {  // 16 values, the half v % 2 of block v / 2
            const float* const from = arranged + v / 2 * 4 + v % 2 * 16;
            _mm512_storeu_ps(out + 16 * v, _mm512_i32gather_ps(first, from, sizeof(float)));
        }
    }
};

}  // namespace
}  // namespace coldpress
