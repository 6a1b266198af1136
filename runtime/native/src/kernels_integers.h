// Products of quantized rows and rounded vectors, over an Isa that also defines
//   Ints (partial sums of 32 bits), products(block of int8_group32, 32 whole numbers of 8 bits), join(high, low) =
//   256 * high + low, and to_float; for formats with a layout, add_products<F, P>(codes of 32 values, x, their place
//   in x, their groups' scales, sum) -> sum + products * scales, arrange(high, low), which brings a block of two planes
//   of x into the order that add_products takes, and kSharing: the number of vectors that share unpacked codes.
// Include after kernels_body.h; like there, everything is in an anonymous namespace.
#include "kernels_rounding.h"

namespace coldpress {
namespace {

void round_blocks(Format format, const float* x, int64_t blocks, const Rounded& out) {
    if (has_layout(format)) {
        round_layout(format, layout_of(format).zero, x, blocks, out);
        for (int64_t at = 0; out.num_planes == 2 && at < blocks * kBlock; at += kBlock)
            Isa::arrange(out.planes[0] + at, out.planes[1] + at);
        return;
    }
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

// out[t] = the product of a row and x[t]. Minima are multiplied by the sums of x, so that codes need no subtraction.
template <Format F, int P, int T>
[[gnu::always_inline]] inline void dot_pieces(const uint8_t* const* row, int64_t length, const Rounded* x, float* out) {
    constexpr int kEach = kGroups<F>;
    V sums[T];
    float rests[T][16] = {}, scales[T][kEach], last[T] = {};
    for (V& sum : sums) sum = Isa::zero();
    const int64_t whole = over_whole_chunks<F, 1>(row, length, [&](int64_t piece, const auto& at) {
        const Terms<F> terms(at(0));
        for (int t = 0; t < T; ++t) {
            const float* const of_x = x[t].scales + piece * 2 * kEach;
            scale_groups<kEach>(terms.scales, of_x, scales[t], terms.minima, of_x + kEach, rests[t]);
        }
#pragma GCC unroll 8
        for (int part = 0; part < kParts; ++part) {
            const auto codes = codes_at<F>(at(0), part);
            for (int t = 0; t < T; ++t)
                sums[t] = Isa::template add_products<F, P>(codes, x[t], piece * kPiece + part * kBlock,
                                                           scales[t] + part * kEach / kParts, sums[t]);
        }
    });
    if constexpr (kLayout<F>.values == kBlock) {  // blocks of no whole piece, one by one: to pad them takes as long
        const uint8_t* const piece = *row + whole * kChunkBytes<F>;
        const int left = static_cast<int>(blocks_of(length) - whole * kParts);
#pragma GCC unroll 8
        for (int g = 0; g < kParts - 1; ++g) {
            if (g >= left) break;
            const uint8_t* const block = piece + g * block_bytes(F);
            const float own = Isa::half(block + kLayout<F>.scale_at);
            const float least = kHasMinima<F> ? Isa::half(block + kLayout<F>.minimum_at) : own;
            const auto codes = codes_at<F>(piece, g);
            for (int t = 0; t < T; ++t) {
                const float *const of_x = x[t].scales + whole * 2 * kEach, scale = own * of_x[g];
                last[t] += least * of_x[kEach + g];
                sums[t] = Isa::template add_products<F, P>(codes, x[t], whole * kPiece + g * kBlock, &scale, sums[t]);
            }
        }
    }
    for (int t = 0; t < T; ++t) {
        for (int g = 0; g < 16; g += Isa::kWidth) sums[t] = Isa::add(sums[t], Isa::load(rests[t] + g));
        out[t] = Isa::sum(sums[t]) + last[t];
    }
}

// Not inlined: among the loops of all formats in one function, GCC finds no good registers for some (q3_k took half as
// long again).
template <Format F, int P, int T>
[[gnu::noinline]] void dot_rounded_pieces(const uint8_t* const* rows, int64_t count, int64_t length, const Rounded* x,
                                          float* const* out) {
    over_rows<F>(rows, count, length, [&](auto, int64_t i) {
        float found[T];
        dot_pieces<F, P, T>(rows + i, length, x, found);
        for (int t = 0; t < T; ++t) out[t][i] = found[t];
    });
}

void dot_rounded(Format format, const uint8_t* const* rows, int64_t count, int64_t length, int tokens,
                 const Rounded* x, float* const* out) {
    over_planes(format, x[0], [&](auto type, auto planes) {
        constexpr Format F = decltype(type)::value;
        constexpr int P = decltype(planes)::value;
        if constexpr (has_layout(F))
            over_groups<Isa::kSharing>(tokens, [&](auto group, int t) {
                dot_rounded_pieces<F, P, decltype(group)::value>(rows, count, length, x + t, out + t);
            });
        else
            over_rows<F>(rows, count, length, [&](auto taken, int64_t i) {
                for (int t = 0; t < tokens; ++t)
                    dot_rounded_rows<F, P, decltype(taken)::value>(rows + i, blocks_of(length), x[t], out[t] + i);
            });
    });
}

}  // namespace
}  // namespace coldpress
