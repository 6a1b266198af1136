// VNNI beside AVX-512: sums of four products of bytes in one instruction. All else is that of kernels_avx512.cpp.
#include "isa_avx512.h"
// The order of includes matters: the inner loops are written over Isa.
#include "kernels_chunks.h"
#include "kernels_chunks_avx512.h"
#include "kernels_pieces_avx512.h"
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
        } else if constexpr (kCodes.bits > 0) {
            const __m512i first = _mm512_castsi256_si512(unpacked_codes<kCodes.bits>(p));
            out[0] = _mm512_inserti64x4(first, unpacked_codes<kCodes.bits>(p + block_bytes(F)), 1);
        } else {
            const auto load = [](const uint8_t* from) {
                return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
            };
            const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(load(p + 2)), load(p + 36), 1);
            out[0] = _mm512_xor_si512(both, _mm512_set1_epi8(-128));
        }
    }

    // Each block's scale in its lanes.
    static __m512 scales(const uint8_t* p) {
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

// The codes of a piece. Values keep their order: lane j of vector v of four has those of values 64 v + 4 j and the next
// three.
template <Format F>
struct PieceCodes {
    using Own = Piece<F>;
    static constexpr Layout kHas = kLayout<F>;
    static constexpr int32_t kZero = F == Format::iq4_nl ? 128 : kHas.zero;  // of codes as unsigned bytes

    // The groups' scales times those of x; `sum` gets their starts times the sums of x.
    static __m512 factors(const uint8_t* p, const float* of_x, __m512& sum) {
        if constexpr (kGroups<F> == 8) {
            const __m512 found = _mm512_mul_ps(Own::eight(p), _mm512_loadu_ps(of_x));
            sum = _mm512_mask_add_ps(sum, 0xFF00, sum, found);
            return found;
        } else {
            __m512 scales, minima;
            Own::sixteen(p, scales, minima);
            sum = _mm512_fmadd_ps(minima, _mm512_loadu_ps(of_x + kGroups<F>), sum);
            return _mm512_mul_ps(scales, _mm512_loadu_ps(of_x));
        }
    }

    // Bits of 64 values, in 32 bytes twice, or in 64 bytes.
    template <int kAt, int kCount>
    static __m512i bits(const uint8_t* p, Field first, Field second) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + kAt + first.at));
        const __m512i bytes = first.at == second.at ? _mm512_broadcast_i64x4(half)
                                                    : _mm512_loadu_si512(p + kAt + first.at);
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
            const __m512i first = _mm512_broadcast_i32x4(Own::load16(a + kHas.low_at));
            const __m512i pairs = _mm512_mask_broadcast_i32x4(first, 0xFF00, Own::load16(b + kHas.low_at));
            const __m512i shifts = _mm512_set_epi64(0x0004000400040004, 0x0004000400040004, 0, 0, 0x0004000400040004,
                                                    0x0004000400040004, 0, 0);
            const __m512i low = _mm512_and_si512(_mm512_srlv_epi16(pairs, shifts), _mm512_set1_epi8(15));
            if constexpr (F == Format::iq4_nl) {
                const __m512i table = _mm512_broadcast_i32x4(Own::load16(kLevels));
                return _mm512_shuffle_epi8(_mm512_xor_si512(table, _mm512_set1_epi8(-128)), low);
            }
            if constexpr (kHas.high_bits == 0) return low;
            const uint64_t upper = Own::load32(b + kHas.high_at), high = Own::load32(a + kHas.high_at) | upper << 32;
            return _mm512_mask_add_epi8(low, _cvtu64_mask64(high), low, _mm512_set1_epi8(16));
        } else {
            const __m512i low = bits<kHas.low_at, kHas.low_bits>(p, low_field(F, 2 * v), low_field(F, 2 * v + 1));
            if constexpr (kHas.high_bits == 0) return low;
            if constexpr (kHas.high_bits == 1) {  // bit `part` of 32 bytes
                const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + kHas.high_at));
                const __m512i own = _mm512_inserti64x4(_mm512_set1_epi8(static_cast<char>(1 << 2 * v)),
                                                       _mm256_set1_epi8(static_cast<char>(2 << 2 * v)), 1);
                const __mmask64 set = _mm512_test_epi8_mask(_mm512_broadcast_i64x4(bytes), own);
                return _mm512_mask_add_epi8(low, set, low, _mm512_set1_epi8(1 << kHas.low_bits));
            }
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
        const __m512i groups = kGroups<F> == 16 ? lanes : _mm512_srli_epi32(lanes, 1);
        const __m512i place = _mm512_add_epi32(groups, _mm512_set1_epi32(v * kGroups<F> / 4));
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_permutexvar_ps(place, factors), sum);
    }
};

// Adds to two sums, so that additions seldom wait.
template <Format F, int P>
[[gnu::always_inline]] inline void add_piece(__m512* sums, const uint8_t* p, const Rounded& x, int64_t piece) {
    using Own = PieceCodes<F>;
    const __m512 factors = Own::factors(p, x.scales + piece * 2 * kGroups<F>, sums[0]);
    sums[1] = Own::template add_products<0, P>(sums[1], p, x, piece * kPiece, factors);
    sums[0] = Own::template add_products<1, P>(sums[0], p, x, piece * kPiece, factors);
    sums[1] = Own::template add_products<2, P>(sums[1], p, x, piece * kPiece, factors);
    sums[0] = Own::template add_products<3, P>(sums[0], p, x, piece * kPiece, factors);
}

template <Format F, int P, int R>
inline void dot_pieces(const uint8_t* const* rows, int64_t length, const Rounded& x, float* out) {
    __m512 sums[R][2];
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    over_chunks<F, R>(rows, length, [&](int64_t piece, const auto& at) {
        for (int r = 0; r < R; ++r) add_piece<F, P>(sums[r], at(r), x, piece);
    });
    for (int r = 0; r < R; ++r) out[r] = _mm512_reduce_add_ps(_mm512_add_ps(sums[r][0], sums[r][1]));
}

void round_packed(Format format, const float* x, int64_t blocks, const Rounded& out) {
    with_format(format, [&](auto type) {
        constexpr Format F = decltype(type)::value;
        if constexpr (has_layout(F))
            round_layout(F, PieceCodes<F>::kZero, x, blocks, out);
        else if constexpr (F != Format::fp16)
            round_format<F>(x, blocks, out);
    });
}

void dot_rounded_packed(Format format, const uint8_t* const* rows, int64_t count, int64_t length, const Rounded& x,
                        float* out) {
    over_rounded_rows(format, rows, count, length, x,
                      [&](auto type, auto planes, auto taken, int64_t i) {
                          constexpr Format F = decltype(type)::value;
                          constexpr int P = decltype(planes)::value, R = decltype(taken)::value;
                          if constexpr (has_layout(F))
                              dot_pieces<F, P, R>(rows + i, length, x, out + i);
                          else
                              dot_packed_rows<F, P, R>(rows + i, blocks_of(length), x, out + i);
                      });
}

}  // namespace

const VnniKernels kVnniKernels{round_packed, dot_rounded_packed};

}  // namespace coldpress
