// Blocks with a layout in pieces of 256 values with AVX-512: one block, or eight, whose 8 or 16 groups' scales and minima
// are found together. Include before kernels_body.h.

#include "kernels_blocks.h"

namespace coldpress {
namespace {

// The scales and minima of a piece's groups; a format without minima has its scales instead.
template <Format F>
struct Piece {
    static constexpr Layout kHas = kLayout<F>;
    static constexpr int64_t kBlocks = kPiece / block_values(F), kBytes = kBlocks * block_bytes(F);

    // Of 8 groups, the scales and then the minima.
    static __m512 eight(const uint8_t* p) {
        if constexpr (kHas.values == kBlock) {
            const __m256i low = _mm256_setr_epi16(0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
            const __m256i both = _mm256_setr_epi16(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
            return _mm512_cvtph_ps(_mm256_permutexvar_epi16(kHasMinima<F> ? both : low, first_words(p)));
        } else {  // two halves, and 12 bytes of numbers a, b, c: the last four have four bits in c, and two in a or b
            const __m128i head = load16(p), upper = _mm_setr_epi32(0, 0x30303030, 0, 0x30303030);
            const __m128i kept = _mm_setr_epi32(0x3F3F3F3F, 0x0F0F0F0F, 0x3F3F3F3F, 0x0F0F0F0F);
            const __m128i words = _mm_shuffle_epi32(head, _MM_SHUFFLE(3, 2, 3, 1));
            const __m128i four = _mm_srlv_epi32(words, _mm_setr_epi32(0, 0, 0, 4));
            const __m128i two = _mm_srli_epi32(_mm_shuffle_epi32(head, _MM_SHUFFLE(2, 2, 1, 1)), 2);
            const __m256i places = _mm256_setr_epi16(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            const __m512 units = _mm512_cvtph_ps(_mm256_permutexvar_epi16(places, _mm256_castsi128_si256(head)));
            return _mm512_mul_ps(units, floats(_mm_or_si128(_mm_and_si128(four, kept), _mm_and_si128(two, upper))));
        }
    }

    // Of 16 groups.
    static void sixteen(const uint8_t* p, __m512& scales, __m512& minima) {
        const __m128i low = _mm_set1_epi8(15), numbers = load16(p + kHas.groups_at - (F == Format::q3_k ? 4 : 0));
        __m128i own = numbers;
        if constexpr (F == Format::q2_k) own = _mm_and_si128(numbers, low);
        if constexpr (F == Format::q3_k) {  // words a, b, c behind another: c has the upper two bits
            const __m128i words = _mm_shuffle_epi32(numbers, _MM_SHUFFLE(2, 1, 2, 1));
            const __m128i four = _mm_srlv_epi32(words, _mm_setr_epi32(0, 0, 4, 4));
            const __m128i two = _mm_rolv_epi32(_mm_shuffle_epi32(numbers, 0xFF), _mm_setr_epi32(4, 2, 0, 30));
            own = _mm_or_si128(_mm_and_si128(four, low), _mm_and_si128(two, _mm_set1_epi8(0x30)));
            own = _mm_sub_epi8(own, _mm_set1_epi8(kScaleZero<F>));
        }
        minima = scales = _mm512_mul_ps(half_at(p + kHas.scale_at), floats(own));
        if constexpr (kHasMinima<F>)
            minima = _mm512_mul_ps(half_at(p + kHas.minimum_at), floats(_mm_and_si128(_mm_srli_epi16(numbers, 4), low)));
    }

    static __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
    static uint32_t load32(const uint8_t* p) {
        uint32_t word;
        __builtin_memcpy(&word, p, sizeof word);
        return word;
    }

   private:
    // The first four bytes of eight blocks.
    static __m256i first_words(const uint8_t* p) {
        if constexpr (kHas.bytes == 20) {  // one load has four of them
            const __m512i places = _mm512_setr_epi32(0, 5, 10, 15, 16, 21, 26, 31, 0, 0, 0, 0, 0, 0, 0, 0);
            const __m512i last = _mm512_loadu_si512(p + 80);
            return _mm512_castsi512_si256(_mm512_permutex2var_epi32(_mm512_loadu_si512(p), places, last));
        }
        return eight_words(p, kHas.bytes);
    }
    static __m512 half_at(const uint8_t* p) {
        int16_t bits;
        __builtin_memcpy(&bits, p, sizeof bits);
        return _mm512_cvtph_ps(_mm256_set1_epi16(bits));
    }
    static __m512 floats(__m128i numbers) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers)); }
};

// A piece whose values are looked up in a table of its group, scale * code + start, by the low bits of their codes.
template <Format F>
struct Unit<F, 16> {
    using Own = Piece<F>;
    static constexpr Layout kHas = kLayout<F>;
    static constexpr bool kUnrolled = true;
    alignas(64) float terms[2 * kGroups<F>];  // scales, and then minima
    const uint8_t* piece;

    [[gnu::always_inline]] explicit Unit(const uint8_t* p) : piece(p) {
        if constexpr (kGroups<F> == 8) {
            _mm512_store_ps(terms, Own::eight(p));
        } else {
            V scales, minima;
            Own::sixteen(p, scales, minima);
            _mm512_store_ps(terms, scales);
            if constexpr (kHasMinima<F>) _mm512_store_ps(terms + 16, minima);
        }
        // A term that is loaded into all lanes leaves the one port of lookups alone; compilers would keep the vectors.
        asm("" : "+m"(terms));
    }

    [[gnu::always_inline]] void unpack(int part, V* values) const {
        if constexpr (kHas.high_bits == 2) Isa::widen(codes_at<F>(piece, part), values);
        for (int v = 0; v < 2; ++v) {
            const int group = (part * 32 + v * 16) / kHas.group;
            const V scale = _mm512_set1_ps(terms[group]);
            if constexpr (kHas.high_bits == 2)
                values[v] = _mm512_mul_ps(_mm512_sub_ps(values[v], _mm512_set1_ps(kHas.zero)), scale);
            else
                values[v] = looked_up(part, v, scale, _mm512_set1_ps(terms[kGroups<F> + group]));
        }
    }

   private:
    // Lookups use only the low four bits of each lane, or five with two tables; a table of fewer codes repeats.
    V looked_up(int part, int v, V scale, V minimum) const {
        constexpr int kBits = kHas.low_bits + kHas.high_bits;
        const Field low = kHas.values == kBlock ? Field{part * kHas.bytes - 16 * v, 4 * v} : low_field(F, part);
        const __m512i bytes = _mm512_cvtepu8_epi32(Own::load16(piece + kHas.low_at + low.at + 16 * v));
        __m512i codes = _mm512_srli_epi32(bytes, low.shift);
        if constexpr (kHas.high_bits == 1) {
            codes = _mm512_and_si512(codes, _mm512_set1_epi32((1 << kHas.low_bits) - 1));
            codes = _mm512_mask_or_epi32(codes, high_bits(part, v), codes, _mm512_set1_epi32(1 << kHas.low_bits));
        }
        const __m512i counted = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        __m512i levels = _mm512_and_si512(counted, _mm512_set1_epi32((1 << kBits) - 1));
        if constexpr (F == Format::iq4_nl) levels = _mm512_cvtepi8_epi32(Own::load16(kLevels));
        const V table = values_of(levels, scale, minimum);
        if constexpr (kBits < 5) return _mm512_permutexvar_ps(codes, table);
        const V upper = values_of(_mm512_add_epi32(levels, _mm512_set1_epi32(16)), scale, minimum);
        return _mm512_permutex2var_ps(table, codes, upper);
    }
    static V values_of(__m512i levels, V scale, V minimum) {
        const V numbers = _mm512_cvtepi32_ps(_mm512_sub_epi32(levels, _mm512_set1_epi32(kHas.zero)));
        if constexpr (!kHasMinima<F>) return _mm512_mul_ps(numbers, scale);
        return start_factor(F, 0) > 0.0f ? _mm512_fmadd_ps(numbers, scale, minimum)
                                         : _mm512_fmsub_ps(numbers, scale, minimum);
    }
    __mmask16 high_bits(int part, int v) const {
        if constexpr (kHas.values == kBlock) {
            uint16_t bits;
            __builtin_memcpy(&bits, piece + part * kHas.bytes + kHas.high_at + 2 * v, sizeof bits);
            return bits;
        }
        const __m512i bytes = _mm512_cvtepu8_epi32(Own::load16(piece + kHas.high_at + 16 * v));
        return _mm512_test_epi32_mask(bytes, _mm512_set1_epi32(1 << high_field(F, part).shift));
    }
};

}  // namespace
}  // namespace coldpress
