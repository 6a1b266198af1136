// Products of quantized rows and rounded vectors, over an Isa that also defines
//   Ints (partial sums of 32 bits), products(block of int8_group32, 32 whole numbers of 8 bits), join(high, low) =
//   256 * high + low, and to_float; for formats with a layout, add_products<F, P>(codes of 32 values, x, their place
//   in x, their groups' scales, sum) -> sum + products * scales.
// Include after kernels_body.h; like there, everything is in an anonymous namespace.
#include "kernels_rounding.h"

namespace coldpress {
namespace {

void round_blocks(Format format, const float* x, int64_t blocks, const Rounded& out) {
    if (has_layout(format)) return round_layout(format, layout_of(format).zero, x, blocks, out);
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t at = b * kBlock;
        out.scales[b] = out.num_planes == 2 ? round_group<2>(x + at, out.planes[0] + at, out.planes[1] + at)
                                            : round_group<1>(x + at, out.planes[0] + at, nullptr);
    }
}

template <Format F, int P, int R>
inline void dot_rounded_rows(const uint8_t* const* rows, int64_t blocks, const Rounded& x, float* out) {
    V sums[R];
    for (int r = 0; r < R; ++r) sums[r] = Isa::zero();
    for (int64_t b = 0; b < blocks; ++b) {
        look_ahead<F, R>(rows + kRowsAhead, b);
        const V scale = Isa::set1(x.scales[b]);
        for (int r = 0; r < R; ++r) {
            const uint8_t* block = rows[r] + b * block_bytes(F);
            typename Isa::Ints total = Isa::products(block, x.planes[0] + b * kBlock);
            if constexpr (P == 2) total = Isa::join(total, Isa::products(block, x.planes[1] + b * kBlock));
            sums[r] = Isa::fma(Isa::to_float(total), Isa::mul(Isa::scale(block), scale), sums[r]);
        }
    }
    for (int r = 0; r < R; ++r) out[r] = Isa::sum(sums[r]);
}

// out[g] = left[g] * right[g], and sums[g] += starts[g] * of_x[g] for the groups of a piece
template <int kEach>
[[gnu::always_inline]] inline void scale_groups(const float* left, const float* right, float* out, const float* starts,
                                                const float* of_x, float* sums) {
    if constexpr (kEach % Isa::kWidth == 0) {
        for (int g = 0; g < kEach; g += Isa::kWidth) {
            Isa::store(out + g, Isa::mul(Isa::load(left + g), Isa::load(right + g)));
            Isa::store(sums + g, Isa::add(Isa::load(sums + g), Isa::mul(Isa::load(starts + g), Isa::load(of_x + g))));
        }
    } else {
        for (int g = 0; g < kEach; ++g) out[g] = left[g] * right[g], sums[g] += starts[g] * of_x[g];
    }
    asm("" : "+m"(*reinterpret_cast<float(*)[kEach]>(out)));  // else GCC takes each scale out of a register, not memory
}

// The product with one row. Minima are multiplied by the sums of x, so that codes need no subtraction.
template <Format F, int P>
[[gnu::always_inline]] inline float dot_pieces(const uint8_t* const* row, int64_t length, const Rounded& x) {
    constexpr int kEach = kGroups<F>;
    V sums[4] = {Isa::zero(), Isa::zero(), Isa::zero(), Isa::zero()};
    float rests[16] = {}, scales[kEach], last = 0.0f;
    const int64_t whole = over_whole_chunks<F, 1>(row, length, [&](int64_t piece, const auto& at) {
        const float* const of_x = x.scales + piece * 2 * kEach;
        const Terms<F> terms(at(0));
        scale_groups<kEach>(terms.scales, of_x, scales, terms.minima, of_x + kEach, rests);
#pragma GCC unroll 8
        for (int part = 0; part < kParts; ++part)
            sums[part % 4] =
                Isa::template add_products<F, P>(codes_at<F>(at(0), part), x, piece * kPiece + part * kBlock,
                                                 scales + part * kEach / kParts, sums[part % 4]);
    });
    if constexpr (kLayout<F>.values == kBlock) {  // blocks of no whole piece, one by one: to pad them takes as long
        const float* const of_x = x.scales + whole * 2 * kEach;
        const uint8_t* const piece = *row + whole * kChunkBytes<F>;
        const int left = static_cast<int>(blocks_of(length) - whole * kParts);
#pragma GCC unroll 8
        for (int g = 0; g < kParts - 1; ++g) {
            if (g >= left) break;
            const uint8_t* const block = piece + g * block_bytes(F);
            const float own = Isa::half(block + kLayout<F>.scale_at), scale = own * of_x[g];
            last += (kHasMinima<F> ? Isa::half(block + kLayout<F>.minimum_at) : own) * of_x[kEach + g];
            sums[g % 4] = Isa::template add_products<F, P>(codes_at<F>(piece, g), x, whole * kPiece + g * kBlock,
                                                           &scale, sums[g % 4]);
        }
    }
    V sum = Isa::add(Isa::add(sums[0], sums[1]), Isa::add(sums[2], sums[3]));
    for (int g = 0; g < 16; g += Isa::kWidth) sum = Isa::add(sum, Isa::load(rests + g));
    return Isa::sum(sum) + last;
}

// Not inlined: among the loops of all formats in one function, GCC finds no good registers for some (q3_k took half as
// long again).
template <Format F, int P>
[[gnu::noinline]] void dot_rounded_pieces(const uint8_t* const* rows, int64_t count, int64_t length, const Rounded& x,
                                          float* out) {
    over_rows<F>(rows, count, length, [&](auto, int64_t i) { out[i] = dot_pieces<F, P>(rows + i, length, x); });
}

void dot_rounded(Format format, const uint8_t* const* rows, int64_t count, int64_t length, const Rounded& x,
                 float* out) {
    over_planes(format, x, [&](auto type, auto planes) {
        constexpr Format F = decltype(type)::value;
        constexpr int P = decltype(planes)::value;
        if constexpr (has_layout(F))
            dot_rounded_pieces<F, P>(rows, count, length, x, out);
        else
            over_rows<F>(rows, count, length, [&](auto taken, int64_t i) {
                dot_rounded_rows<F, P, decltype(taken)::value>(rows + i, blocks_of(length), x, out + i);
            });
    });
}

}  // namespace
}  // namespace coldpress
