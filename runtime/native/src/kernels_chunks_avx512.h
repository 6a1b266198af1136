// Four blocks of int4 at a time with AVX-512: each 32-bit lane holds eight values and each block has four lanes, so
// that no value is widened and one load gets all scales. Include after kernels_chunks.h.

namespace coldpress {
namespace {

template <>
struct Chunk<Format::int4_group32> {
    static constexpr int64_t kBlocks = 4;
    static constexpr int kVectors = 8;

    // Two vectors use a lookup: vpermps uses only the low four bits of each lane, so it masks, subtracts 8 and converts
    // in one. The other values stay in their place in the lanes, as low bits of a float: each place counts 16 times the
    // one before, and `arrange` divides by that. With shifts and lookups only, all would wait for two execution ports.
    static void unpack(const uint8_t* chunk, V* values) {
        const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        const __m512i codes = codes_of_four(chunk), higher = _mm512_srli_epi32(codes, 20);
        values[0] = _mm512_permutexvar_ps(codes, table);
        values[1] = in_place<1>(codes);
        values[2] = in_place<2>(codes);
        values[3] = in_place<3>(codes);
        values[4] = in_place<4>(codes);
        values[5] = _mm512_permutexvar_ps(higher, table);
        values[6] = in_place<1>(higher);
        values[7] = in_place<2>(higher);
    }
    template <int kPlace>
    static V in_place(__m512i codes) {
        constexpr int kLargest = 15 << (4 * kPlace), kBits = 0x4B000000;  // bits of 2^23, whose last place counts 1
        const __m512i code = _mm512_and_si512(codes, _mm512_set1_epi32(kLargest));
        const __m512i bits = _mm512_or_si512(code, _mm512_set1_epi32(kBits));
        return _mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(8388608.0f + 8.0f * (1 << (4 * kPlace))));
    }
    // The factor that turns multiples into a vector's values.
    static V share(int v) { return _mm512_set1_ps(1.0f / static_cast<float>(1 << (4 * (v % 5)))); }

    static V scale(const uint8_t* chunk) { return scales_of_four(chunk); }

    // Vector 2 b + h holds, in lane 4 m + j, value 16 h + 4 j + b of block m.
    static void arrange(const float* x, float* out) {
        const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 32, 36, 40, 44, 64, 68, 72, 76, 96, 100, 104, 108);
        for (int v = 0; v < kVectors; ++v) {
            const V values = _mm512_i32gather_ps(first, x + v / 2 + v % 2 * 16, sizeof(float));
            _mm512_storeu_ps(out + 16 * v, _mm512_mul_ps(values, share(v)));
        }
    }
    static void restore(const float* arranged, float* out) {
        const __m512i first = _mm512_setr_epi32(0, 32, 64, 96, 1, 33, 65, 97, 2, 34, 66, 98, 3, 35, 67, 99);
        float values[kBlocks * kBlock];
        for (int v = 0; v < kVectors; ++v)
            _mm512_storeu_ps(values + 16 * v, _mm512_mul_ps(_mm512_loadu_ps(arranged + 16 * v), share(v)));
        for (int v = 0; v < kVectors; ++v)  // 16 values, the half v % 2 of block v / 2
            _mm512_storeu_ps(out + 16 * v, _mm512_i32gather_ps(first, values + v / 2 * 4 + v % 2 * 16, sizeof(float)));
    }
};

}  // namespace
}  // namespace coldpress
