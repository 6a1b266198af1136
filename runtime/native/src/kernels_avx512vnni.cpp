// VNNI beside AVX-512: sums of four products of bytes in one instruction. All else is that of kernels_avx512.cpp.
#include "isa_avx512.h"
// The order of includes matters: the inner loops are written over Isa.
#include "kernels_pieces_avx512.h"
#include "kernels_body.h"
#include "kernels_rounding.h"

namespace coldpress {
namespace {

// One vector of bytes holds two blocks of int8_group32, which have eight 32-bit lanes each. vpdpbusd takes codes as
// unsigned, so each lane's sum is too large by 128 times its numbers; sums begin at minus that.
constexpr int64_t kLanes = 8, kPair = 2 * block_bytes(Format::int8_group32);

void round_pairs(const float* x, int64_t blocks, const Rounded& out) {
    int8_t numbers[2][kBlock] = {};
    for (int64_t b = 0; b < (blocks + 1) / 2 * 2; ++b) {
        float scale = 0.0f;
        if (b < blocks)
            scale = out.num_planes == 2 ? round_group<2>(x + b * kBlock, numbers[0], numbers[1])
                                        : round_group<1>(x + b * kBlock, numbers[0], nullptr);
        for (int64_t i = 0; i < kLanes; ++i) out.scales[b * kLanes + i] = scale;
        for (int plane = 0; plane < out.num_planes; ++plane) {
            const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers[plane]));
            const __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), all);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.planes[plane] + b * kBlock), all);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.starts[plane] + b * kLanes),
                                _mm256_mullo_epi32(sums, _mm256_set1_epi32(-128)));
        }
    }
}

// The parts that are the same for all rows: the numbers of two blocks, the sums' start values, and scales.
template <int P>
struct Numbers {
    __m512i values[P], starts[P];
    __m512 scales;

    Numbers(const Rounded& x, int64_t pair) {
        for (int plane = 0; plane < P; ++plane) {
            values[plane] = _mm512_loadu_si512(x.planes[plane] + pair * 64);
            starts[plane] = _mm512_loadu_si512(x.starts[plane] + pair * 16);
        }
        scales = _mm512_loadu_ps(x.scales + pair * 16);
    }

    __m512 add_to(__m512 sum, const uint8_t* blocks) const {
        const auto load = [](const uint8_t* from) {
            return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        };
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(load(blocks + 2)), load(blocks + 36), 1);
        const __m512i codes = _mm512_xor_si512(both, _mm512_set1_epi8(-128));
        __m512i total[P];
        for (int plane = 0; plane < P; ++plane)
            total[plane] = _mm512_dpbusd_epi32(starts[plane], codes, values[plane]);
        if constexpr (P == 2) total[0] = _mm512_add_epi32(_mm512_slli_epi32(total[0], 8), total[1]);
        int16_t first, second;
        __builtin_memcpy(&first, blocks, sizeof first);
        __builtin_memcpy(&second, blocks + kPair / 2, sizeof second);
        const __m512 own = _mm512_cvtph_ps(_mm256_set_m128i(_mm_set1_epi16(second), _mm_set1_epi16(first)));
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[0]), _mm512_mul_ps(own, scales), sum);
    }
};

template <int P, int R>
inline void dot_pairs(const uint8_t* const* rows, int64_t blocks, const Rounded& x, float* out) {
    const int64_t pairs = blocks / 2;
    __m512 sums[R];
    for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; ++pair) {
        look_ahead<Format::int8_group32, R>(rows + kRowsAhead, pair * 2);
        const Numbers<P> numbers(x, pair);
        for (int r = 0; r < R; ++r) sums[r] = numbers.add_to(sums[r], rows[r] + pair * kPair);
    }
    if (blocks % 2 != 0) {
        const Numbers<P> numbers(x, pairs);
        for (int r = 0; r < R; ++r) {
            uint8_t last[kPair] = {};  // a block of zeros behind the row's end
            __builtin_memcpy(last, rows[r] + pairs * kPair, static_cast<size_t>(kPair / 2));
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
        else
            round_pairs(x, blocks, out);
    });
}

void dot_rounded_packed(Format format, const uint8_t* const* rows, int64_t count, int64_t length, int tokens,
                        const Rounded* x, float* const* out) {
    over_planes(format, x[0], [&](auto type, auto planes) {
        constexpr Format F = decltype(type)::value;
        constexpr int P = decltype(planes)::value;
        over_rows<F>(rows, count, length, [&](auto taken, int64_t i) {
            constexpr int R = decltype(taken)::value;
            for (int t = 0; t < tokens; ++t) {
                if constexpr (has_layout(F))
                    dot_pieces<F, P, R>(rows + i, length, x[t], out[t] + i);
                else
                    dot_pairs<P, R>(rows + i, blocks_of(length), x[t], out[t] + i);
            }
        });
    });
}

}  // namespace

const VnniKernels kVnniKernels{round_packed, dot_rounded_packed};

}  // namespace coldpress
