// VNNI beside AVX-512: sums of four products of bytes in one instruction. All else is that of kernels_avx512.cpp.
#include "isa_avx512.h"
// The order of includes matters: the inner loops are written over Isa.
#include "kernels_chunks.h"
#include "kernels_chunks_avx512.h"
#include "kernels_body.h"
#include "kernels_rounding.h"

namespace coldpress {
namespace {

// One vector of bytes holds `kBlocks` blocks of a format, which share its 32-bit lanes equally. vpdpbusd takes codes as
// unsigned, so each lane's sum is too large by `kOffset` times its numbers; sums begin at minus that.
template <Format F>
struct Packed {
    static constexpr Codes kCodes = codes_of(F);
    static constexpr bool kNibbles = kCodes.bits == 4;
    static constexpr int64_t kBlocks = kNibbles ? 4 : 2, kLanes = 16 / kBlocks, kBytes = kBlocks * block_bytes(F);
    static constexpr int32_t kOffset = kCodes.bits ? kCodes.zero : 128;
    static constexpr int kVectors = kNibbles ? 2 : 1;  // the two nibbles of a byte are 16 values apart

    // Codes as unsigned bytes: the low and then the high nibbles of four blocks, or all codes of two blocks.
    static void codes(const uint8_t* p, __m512i* out) {
        if constexpr (kNibbles) {
            const __m512i pairs = codes_of_four(p), low = _mm512_set1_epi8(15);
            out[0] = _mm512_and_si512(pairs, low);
            out[1] = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low);
            if constexpr (kCodes.step != 1)
                for (int i = 0; i < 2; ++i) out[i] = _mm512_slli_epi16(out[i], __builtin_ctz(kCodes.step));
        } else if constexpr (kCodes.bits > 0) {
            const __m512i first = _mm512_castsi256_si512(stepped_codes<F>(p));
            out[0] = _mm512_inserti64x4(first, stepped_codes<F>(p + block_bytes(F)), 1);
        } else {
            const auto load = [](const uint8_t* from) {
                return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
            };
            const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(load(p + 2)), load(p + 36), 1);
            out[0] = _mm512_xor_si512(both, _mm512_set1_epi8(-128));
        }
    }

    // Each block's scale in its lanes, times its unit.
    static __m512 scales(const uint8_t* p) {
        const __m512 found = plain_scales(p);
        return unit_of(F) == 1.0f ? found : _mm512_mul_ps(found, _mm512_set1_ps(unit_of(F)));
    }
    static __m512 plain_scales(const uint8_t* p) {
        if constexpr (kNibbles) {
            return scales_of_four(p);
        } else {
            int16_t first, second;
            __builtin_memcpy(&first, p, sizeof first);
            __builtin_memcpy(&second, p + block_bytes(F), sizeof second);
            return _mm512_cvtph_ps(_mm256_set_m128i(_mm_set1_epi16(second), _mm_set1_epi16(first)));
        }
    }
};

// Stores a block's numbers and the start values of its lanes where `Packed` expects them.
template <Format F>
void pack_block(int64_t b, const int8_t* numbers, int8_t* plane, int32_t* starts) {
    using Place = Packed<F>;
    const int64_t group = b / Place::kBlocks, member = b % Place::kBlocks;
    constexpr int64_t run = 4 * Place::kLanes;  // values of a block in one vector
    for (int64_t v = 0; v < Place::kVectors; ++v)
        __builtin_memcpy(plane + (group * Place::kVectors + v) * 64 + member * run, numbers + v * run, run);
    const __m256i ones = _mm256_set1_epi8(1), all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers));
    const __m256i sums = _mm256_mullo_epi32(_mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, all),
                                            _mm256_set1_epi32(-Place::kOffset));
    int32_t* lanes = starts + b * Place::kLanes;
    if constexpr (Place::kNibbles)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes),
                         _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)));
    else
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sums);
}

template <Format F>
void round_format(const float* x, int64_t blocks, const Rounded& out) {
    constexpr int64_t lanes = Packed<F>::kLanes, members = Packed<F>::kBlocks;
    int8_t numbers[2][kBlock] = {};
    for (int64_t b = 0; b < (blocks + members - 1) / members * members; ++b) {
        float scale = 0.0f;
        if (b < blocks)
            scale = out.num_planes == 2 ? round_group<2>(x + b * kBlock, numbers[0], numbers[1])
                                        : round_group<1>(x + b * kBlock, numbers[0], nullptr);
        for (int64_t i = 0; i < lanes; ++i) out.scales[b * lanes + i] = scale;
        for (int plane = 0; plane < out.num_planes; ++plane)
            pack_block<F>(b, numbers[plane], out.planes[plane], out.starts[plane]);
    }
}

void round_packed(Format format, const float* x, int64_t blocks, const Rounded& out) {
    with_format(format, [&](auto type) {
        constexpr Format F = decltype(type)::value;
        if constexpr (has_layout(F))
            round_layout(F, x, blocks, out);
        else if constexpr (F != Format::fp16)
            round_format<F>(x, blocks, out);
    });
}

// The parts that are the same for all rows: a vector's numbers, the sums' start values, and scales.
template <Format F, int P>
struct Numbers {
    __m512i values[P][Packed<F>::kVectors], starts[P];
    __m512 scales;

    Numbers(const Rounded& x, int64_t group) {
        for (int plane = 0; plane < P; ++plane) {
            for (int v = 0; v < Packed<F>::kVectors; ++v)
                values[plane][v] = _mm512_loadu_si512(x.planes[plane] + (group * Packed<F>::kVectors + v) * 64);
            starts[plane] = _mm512_loadu_si512(x.starts[plane] + group * 16);
        }
        scales = _mm512_loadu_ps(x.scales + group * 16);
    }

    __m512 add_to(__m512 sum, const uint8_t* blocks) const {
        __m512i codes[Packed<F>::kVectors], total[P];
        Packed<F>::codes(blocks, codes);
        for (int plane = 0; plane < P; ++plane) {
            total[plane] = starts[plane];
            for (int v = 0; v < Packed<F>::kVectors; ++v)
                total[plane] = _mm512_dpbusd_epi32(total[plane], codes[v], values[plane][v]);
        }
        if constexpr (P == 2) total[0] = _mm512_add_epi32(_mm512_slli_epi32(total[0], 8), total[1]);
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[0]), _mm512_mul_ps(Packed<F>::scales(blocks), scales), sum);
    }
};

template <Format F, int P, int R>
inline void dot_packed_rows(const uint8_t* const* rows, int64_t blocks, const Rounded& x, float* out) {
    constexpr int64_t members = Packed<F>::kBlocks, bytes = Packed<F>::kBytes;
    const int64_t groups = blocks / members, rest = blocks % members;
    __m512 sums[R];
    for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g) {
        look_ahead<F, R>(rows + kRowsAhead, g * members);
        const Numbers<F, P> numbers(x, g);
        for (int r = 0; r < R; ++r) sums[r] = numbers.add_to(sums[r], rows[r] + g * bytes);
    }
    if (rest) {
        const Numbers<F, P> numbers(x, groups);
        for (int r = 0; r < R; ++r) {
            uint8_t last[bytes] = {};  // blocks of zeros behind the row's end
            __builtin_memcpy(last, rows[r] + groups * bytes, static_cast<size_t>(rest * block_bytes(F)));
            sums[r] = numbers.add_to(sums[r], last);
        }
    }
    for (int r = 0; r < R; ++r) out[r] = _mm512_reduce_add_ps(sums[r]);
}

// Pieces of 256 values of a format with a layout: one block, or eight, with 8 or 16 groups. Values keep their order: lane j
// of vector v of four has codes of values 64 v + 4 j to 64 v + 4 j + 3.
template <Format F>
struct Piece {
    static constexpr Layout kHas = kLayout<F>;
    static constexpr int64_t kBlocks = 256 / block_values(F), kBytes = kBlocks * block_bytes(F);
    static constexpr int kGroups = 256 / kHas.group;
    static constexpr __mmask16 kUsed = (1 << kGroups) - 1;
    static constexpr int32_t kZero = F == Format::iq4_nl ? 128 : kHas.zero;  // of codes as unsigned bytes

    __m512 scales, starts;  // of the groups; zeros in other lanes

    explicit Piece(const uint8_t* p) {
        if constexpr (kHas.values == kBlock) {
            const auto word = [p](int b) { return static_cast<int>(load32(p + b * kHas.bytes)); };
            const __m256i words = _mm256_setr_epi32(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7));
            scales = halves(words);
            if constexpr (kHas.minimum_at != kNone) starts = halves(_mm256_srli_epi32(words, 16));
        } else {
            const GroupNumbers found = group_numbers<F>(p);
            scales = _mm512_mul_ps(half_at(p + kHas.scale_at), floats(found.scales, kScaleZero<F>));
            if constexpr (kHas.minimum_at != kNone)
                starts = _mm512_mul_ps(half_at(p + kHas.minimum_at), floats(found.minima, 0));
        }
        if constexpr (kHas.minimum_at == kNone) starts = _mm512_mul_ps(scales, _mm512_set1_ps(-kZero));
        if constexpr (kHas.values != kBlock && kHas.minimum_at != kNone) starts = _mm512_sub_ps(_mm512_setzero_ps(), starts);
    }

    static uint32_t load32(const uint8_t* p) {
        uint32_t word;
        __builtin_memcpy(&word, p, sizeof word);
        return word;
    }
    static __m512 halves(__m256i words) {
        return _mm512_zextps256_ps512(_mm256_cvtph_ps(_mm256_cvtepi32_epi16(words)));
    }
    static __m512 half_at(const uint8_t* p) {
        int16_t bits;
        __builtin_memcpy(&bits, p, sizeof bits);
        return _mm512_cvtph_ps(_mm256_set1_epi16(bits));
    }
    static __m512 floats(const uint32_t* bytes, int zero) {
        __m128i numbers = _mm_setr_epi32(static_cast<int>(bytes[0]), static_cast<int>(bytes[1]), static_cast<int>(bytes[2]),
                                         static_cast<int>(bytes[3]));
        if (zero != 0) numbers = _mm_sub_epi8(numbers, _mm_set1_epi8(static_cast<char>(zero)));
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers));
    }

    // Bits of 64 values, in 32 bytes twice, or in 64 bytes.
    template <int kAt, int kCount>
    static __m512i bits(const uint8_t* p, Field first, Field second) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + kAt + first.at));
        const __m512i bytes = first.at == second.at ? _mm512_broadcast_i64x4(half) : _mm512_loadu_si512(p + kAt + first.at);
        const __m512i shifts = _mm512_inserti64x4(_mm512_set1_epi16(static_cast<short>(first.shift)),
                                                  _mm256_set1_epi16(static_cast<short>(second.shift)), 1);
        const __m512i shifted = first.shift == second.shift ? _mm512_srli_epi16(bytes, first.shift)
                                                            : _mm512_srlv_epi16(bytes, shifts);
        return _mm512_and_si512(shifted, _mm512_set1_epi8((1 << kCount) - 1));
    }

    // The codes of vector v as unsigned bytes.
    template <int v>
    static __m512i codes(const uint8_t* p) {
        if constexpr (kHas.values == kBlock) {
            const uint8_t *const a = p + 2 * v * kHas.bytes, *const b = a + kHas.bytes;
            const auto load = [](const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); };
            const __m512i pairs = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(load(a + kHas.low_at)), 0xFF00,
                                                              load(b + kHas.low_at));
            const __m512i shifts = _mm512_set_epi64(0x0004000400040004, 0x0004000400040004, 0, 0, 0x0004000400040004,
                                                    0x0004000400040004, 0, 0);
            const __m512i low = _mm512_and_si512(_mm512_srlv_epi16(pairs, shifts), _mm512_set1_epi8(15));
            if constexpr (F == Format::iq4_nl) {
                const __m512i table = _mm512_broadcast_i32x4(load(reinterpret_cast<const uint8_t*>(kLevels)));
                return _mm512_shuffle_epi8(_mm512_xor_si512(table, _mm512_set1_epi8(-128)), low);
            }
            if constexpr (kHas.high_bits == 0) return low;
            const uint64_t high = load32(a + kHas.high_at) | static_cast<uint64_t>(load32(b + kHas.high_at)) << 32;
            return _mm512_mask_add_epi8(low, _cvtu64_mask64(high), low, _mm512_set1_epi8(16));
        } else {
            const __m512i low = bits<kHas.low_at, kHas.low_bits>(p, low_field(F, 2 * v), low_field(F, 2 * v + 1));
            if constexpr (kHas.high_bits == 0) return low;
            const __m512i high = bits<kHas.high_at, kHas.high_bits>(p, high_field(F, 2 * v), high_field(F, 2 * v + 1));
            return _mm512_or_si512(low, _mm512_slli_epi16(high, kHas.low_bits));
        }
    }

    // sum + the products of vector v; `factors` are the groups' scales times those of x
    template <int v, int P>
    static __m512 add_products(__m512 sum, const uint8_t* p, const Rounded& x, int64_t at, __m512 factors) {
        const __m512i own = codes<v>(p);
        __m512i total = _mm512_setzero_si512();
        for (int plane = 0; plane < P; ++plane) {
            if (plane > 0) total = _mm512_slli_epi32(total, 8);
            total = _mm512_dpbusd_epi32(total, own, _mm512_loadu_si512(x.planes[plane] + at + 64 * v));
        }
        const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        const __m512i groups = kGroups == 16 ? lanes : _mm512_srli_epi32(lanes, 1);
        const __m512i place = _mm512_add_epi32(groups, _mm512_set1_epi32(v * kGroups / 4));
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_permutexvar_ps(place, factors), sum);
    }
};

template <Format F, int P>
[[gnu::always_inline]] inline __m512 add_piece(__m512 sum, const uint8_t* p, const Rounded& x, int64_t piece) {
    using Own = Piece<F>;
    const Own own(p);
    const auto of_x = [piece](const float* from) { return _mm512_maskz_loadu_ps(Own::kUsed, from + piece * Own::kGroups); };
    sum = _mm512_fmadd_ps(own.starts, of_x(x.sums), sum);
    const __m512 factors = _mm512_mul_ps(own.scales, of_x(x.scales));
    sum = Own::template add_products<0, P>(sum, p, x, piece * 256, factors);
    sum = Own::template add_products<1, P>(sum, p, x, piece * 256, factors);
    sum = Own::template add_products<2, P>(sum, p, x, piece * 256, factors);
    return Own::template add_products<3, P>(sum, p, x, piece * 256, factors);
}

template <Format F, int P, int R>
inline void dot_pieces(const uint8_t* const* rows, int64_t blocks, const Rounded& x, float* out) {
    constexpr int64_t bytes = Piece<F>::kBytes;
    const int64_t pieces = blocks / Piece<F>::kBlocks, rest = blocks % Piece<F>::kBlocks;
    __m512 sums[R];
    for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
    for (int64_t i = 0; i < pieces; ++i) {
        for (int64_t b = 0; b < Piece<F>::kBlocks; b += kStride<F>)
            look_ahead<F, R>(rows + kRowsAhead, i * Piece<F>::kBlocks + b);
        for (int r = 0; r < R; ++r) sums[r] = add_piece<F, P>(sums[r], rows[r] + i * bytes, x, i);
    }
    for (int r = 0; rest != 0 && r < R; ++r) {
        uint8_t last[bytes] = {};  // blocks of zeros behind the row's end
        __builtin_memcpy(last, rows[r] + pieces * bytes, static_cast<size_t>(rest * block_bytes(F)));
        sums[r] = add_piece<F, P>(sums[r], last, x, pieces);
    }
    for (int r = 0; r < R; ++r) out[r] = _mm512_reduce_add_ps(sums[r]);
}

void dot_rounded_packed(Format format, const uint8_t* const* rows, int64_t count, int64_t length, const Rounded& x,
                        float* out) {
    over_rounded_rows(format, rows, count, length, x,
                      [&](auto type, auto planes, auto taken, int64_t i) {
                          constexpr Format F = decltype(type)::value;
                          constexpr int P = decltype(planes)::value, R = decltype(taken)::value;
                          const int64_t blocks = blocks_of(length, block_values(F));
                          if constexpr (has_layout(F))
                              dot_pieces<F, P, R>(rows + i, blocks, x, out + i);
                          else
                              dot_packed_rows<F, P, R>(rows + i, blocks, x, out + i);
                      });
}

}  // namespace

const VnniKernels kVnniKernels{round_packed, dot_rounded_packed};

}  // namespace coldpress
