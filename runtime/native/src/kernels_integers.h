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

// Minima are multiplied by the sums of x, so that codes need no subtraction. Not inlined: among the loops of all formats
// in one function, GCC finds no good registers for some (q3_k took half as long again).
template <Format F, int P, int R>
[[gnu::noinline]] void dot_rounded_pieces(const uint8_t* const* rows, int64_t length, const Rounded& x, float* out) {
    constexpr int kEach = kGroups<F>;
    V sums[R][4];
    float rests[R][16] = {};
    for (int r = 0; r < R; ++r)
        for (V& sum : sums[r]) sum = Isa::zero();
    const int64_t whole = over_whole_chunks<F, R>(rows, length, [&](int64_t piece, const auto& at) {
        const float* const of_x = x.scales + piece * 2 * kEach;
        for (int r = 0; r < R; ++r) {
            const Terms<F> terms(at(r));
            float scales[kEach];
            V own[4] = {sums[r][0], sums[r][1], sums[r][2], sums[r][3]};
            for (int g = 0; g < kEach; ++g) {
                scales[g] = terms.scales[g] * of_x[g];
                rests[r][g] += terms.minima[g] * of_x[kEach + g];
            }
#pragma GCC unroll 8
            for (int part = 0; part < kParts; ++part)
                own[part % 4] =
                    Isa::template add_products<F, P>(codes_at<F>(at(r), part), x, piece * kPiece + part * kBlock,
                                                     scales + part * kEach / kParts, own[part % 4]);
            for (int i = 0; i < 4; ++i) sums[r][i] = own[i];
        }
    });
    if constexpr (kLayout<F>.values == kBlock) {  // blocks of no whole piece, one by one: to pad them takes as long
        const float* const of_x = x.scales + whole * 2 * kEach;
        for (int g = 0; g < static_cast<int>(blocks_of(length) - whole * kParts); ++g)
            for (int r = 0; r < R; ++r) {
                const uint8_t* const piece = rows[r] + whole * kChunkBytes<F>;
                const uint8_t* const block = piece + g * block_bytes(F);
                const float own = Isa::half(block + kLayout<F>.scale_at);
                const float least = kHasMinima<F> ? Isa::half(block + kLayout<F>.minimum_at) : own;
                const float scale[2] = {own * of_x[g], 0.0f};
                rests[r][g] += least * of_x[kEach + g];
                sums[r][g % 4] = Isa::template add_products<F, P>(codes_at<F>(piece, g), x, whole * kPiece + g * kBlock,
                                                                  scale, sums[r][g % 4]);
            }
    }
    for (int r = 0; r < R; ++r) {
        V sum = Isa::add(Isa::add(sums[r][0], sums[r][1]), Isa::add(sums[r][2], sums[r][3]));
        for (int g = 0; g < 16; g += Isa::kWidth) sum = Isa::add(sum, Isa::load(rests[r] + g));
        out[r] = Isa::sum(sum);
    }
}

void dot_rounded(Format format, const uint8_t* const* rows, int64_t count, int64_t length, const Rounded& x,
                 float* out) {
    over_rounded_rows(format, rows, count, length, x,
                      [&](auto type, auto planes, auto taken, int64_t i) {
                          constexpr Format F = decltype(type)::value;
                          constexpr int P = decltype(planes)::value, R = decltype(taken)::value;
                          if constexpr (has_layout(F))
                              dot_rounded_pieces<F, P, R>(rows + i, length, x, out + i);
                          else
                              dot_rounded_rows<F, P, R>(rows + i, blocks_of(length), x, out + i);
                      });
}

}  // namespace
}  // namespace coldpress
