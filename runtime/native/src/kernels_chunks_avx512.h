// Four blocks of codes of three or four bits at a time with AVX-512: each 32-bit lane holds eight values as nibbles, and
// each block has four lanes, so that no value is widened and one load gets all scales. Include after kernels_chunks.h.

namespace coldpress {
namespace {

// Where a format's values lie in the lanes. Nibble v of lane 4 m + j is value `kLaneStep * j + first_of(v)` of block m.
template <int kBits>
struct Nibbles {
    static constexpr int kLaneStep = 4;
    static constexpr int first_of(int v) { return v / 2 + v % 2 * 16; }
    static __m512i codes(const uint8_t* chunk) { return codes_of_four(chunk); }
    static __m512 scales(const uint8_t* chunk) { return scales_of_four(chunk); }
};

template <>
struct Nibbles<3> {
    static constexpr int kLaneStep = 2, kWords = 7;  // words of a block: the scale, four of low bits, two of high bits
    static constexpr int first_of(int v) { return v % 4 * 8 + v / 4; }

    // Words of four blocks.
    static __m512i words(const uint8_t* chunk) { return _mm512_maskz_loadu_epi8((1ull << (8 * kWords)) - 1, chunk); }

    // Word j of a block's eight words gets two bytes. Bits 2 k and 2 k + 1 of the low byte, and bit 2 k of the shifted
    // high byte, are the code of value 8 k + j. The bits of each k then move to nibble k of the word.
    static __m512i codes(const uint8_t* chunk) {
        const __m512i all = words(chunk), low_places = of_blocks(0x0004000400030003, 0x0002000200010001);
        __m512i low = _mm512_srlv_epi16(_mm512_permutexvar_epi16(low_places, all), _mm512_set1_epi32(8 << 16));
        low = either(low, 0x000F, _mm512_slli_epi16(low, 4), 0x0F00);
        low = either(low, 0x0303, _mm512_slli_epi16(low, 2), 0x3030);
        const __m512i high_places = of_blocks(0x0006000600050005, 0x0006000600050005);
        const __m512i high_shifts = _mm512_set4_epi32(0x90001, 0x90001, 0x80000, 0x80000);
        __m512i high = _mm512_srlv_epi16(_mm512_permutexvar_epi16(high_places, all), high_shifts);
        high = either(high, 0x0005, _mm512_slli_epi16(high, 4), 0x0500);
        high = either(_mm512_slli_epi16(high, 2), 0x0404, _mm512_slli_epi16(high, 4), 0x4040);
        return _mm512_or_si512(low, high);
    }
    // The places of eight words of the first block, and those of the others kWords further each.
    static __m512i of_blocks(int64_t last_four, int64_t first_four) {
        constexpr int64_t step = kWords * 0x0001000100010001;
        const __m512i places = _mm512_set4_epi64(last_four, first_four, last_four, first_four);
        return _mm512_add_epi16(places, _mm512_set_epi64(3 * step, 3 * step, 2 * step, 2 * step, step, step, 0, 0));
    }
    static __m512i either(__m512i a, short of_a, __m512i b, short of_b) {
        return _mm512_or_si512(_mm512_and_si512(a, _mm512_set1_epi16(of_a)), _mm512_and_si512(b, _mm512_set1_epi16(of_b)));
    }

    static __m512 scales(const uint8_t* chunk) {
        constexpr short w = kWords;
        const __m256i places = _mm256_set_epi16(3 * w, 3 * w, 3 * w, 3 * w, 2 * w, 2 * w, 2 * w, 2 * w, w, w, w, w, 0, 0, 0, 0);
        const __m512i halves = _mm512_permutexvar_epi16(_mm512_castsi256_si512(places), words(chunk));
        return _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    }
};

template <Format F>
struct NibbleChunk {
    static constexpr int64_t kBlocks = 4;
    static constexpr int kVectors = 8;
    static constexpr Codes kCodes = codes_of(F);
    static constexpr float kZero = static_cast<float>(kCodes.zero);
    using Places = Nibbles<kCodes.bits>;

    // Two vectors use a lookup: vpermps uses only the low four bits of each lane, so it masks, subtracts the zero and
    // converts in one. The other values stay in their place in the lanes, as low bits of a float: each place counts 16
    // times the one before, and `arrange` divides by that. With shifts and lookups only, all would wait for two
    // execution ports.
    static void unpack(const uint8_t* chunk, V* values) {
        const __m512 counted = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512 table = _mm512_sub_ps(counted, _mm512_set1_ps(kZero));
        const __m512i codes = Places::codes(chunk), higher = _mm512_srli_epi32(codes, 20);
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
        constexpr float kShift = 8388608.0f + kZero * static_cast<float>(1 << (4 * kPlace));  // exact, a whole number
        return _mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(kShift));
    }
    // The factor that turns multiples into a vector's values.
    static V share(int v) { return _mm512_set1_ps(1.0f / static_cast<float>(1 << (4 * (v % 5)))); }

    static V scale(const uint8_t* chunk) { return Places::scales(chunk); }

    // The place of each lane's first value in the four blocks.
    static __m512i lanes() {
        constexpr int s = Places::kLaneStep;
        return _mm512_setr_epi32(0, s, 2 * s, 3 * s, 32, 32 + s, 32 + 2 * s, 32 + 3 * s, 64, 64 + s, 64 + 2 * s,
                                 64 + 3 * s, 96, 96 + s, 96 + 2 * s, 96 + 3 * s);
    }
    static void arrange(const float* x, float* out) {
        for (int v = 0; v < kVectors; ++v) {
            const V values = _mm512_i32gather_ps(lanes(), x + Places::first_of(v), sizeof(float));
            _mm512_storeu_ps(out + 16 * v, _mm512_mul_ps(values, share(v)));
        }
    }
    static void restore(const float* arranged, float* out) {
        for (int v = 0; v < kVectors; ++v)
            _mm512_i32scatter_ps(out + Places::first_of(v), lanes(),
                                 _mm512_mul_ps(_mm512_loadu_ps(arranged + 16 * v), share(v)), sizeof(float));
    }
};

template <>
struct Chunk<Format::int4_group32> : NibbleChunk<Format::int4_group32> {};
template <>
struct Chunk<Format::int3_group32> : NibbleChunk<Format::int3_group32> {};

}  // namespace
}  // namespace coldpress
