// Products of quantized rows and rounded vectors, over an Isa that also defines
//   Ints (partial sums of 32 bits), products<F>(block, 32 whole numbers of 8 bits) -> Ints, join(high, low) = 256 * high
//   + low, and to_float; for formats with a layout, add_products<F, P>(codes of 32 values, rounded x, their place in it,
//   their groups' scales, sum) -> sum + products * scales.
// Include after kernels_body.h; like there, everything is in an anonymous namespace.
#include "kernels_rounding.h"

namespace coldpress {
namespace {

void round_blocks(Format format, const float* x, int64_t blocks, const Rounded& out) {
    if (has_layout(format)) return round_layout(format, x, blocks, out);
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
            typename Isa::Ints total = Isa::template products<F>(block, x.planes[0] + b * kBlock);
            if constexpr (P == 2) total = Isa::join(total, Isa::template products<F>(block, x.planes[1] + b * kBlock));
            sums[r] = Isa::fma(Isa::to_float(total), Isa::mul(Isa::template scale<F>(block), scale), sums[r]);
        }
    }
    for (int r = 0; r < R; ++r) out[r] = Isa::sum(sums[r]);
}

// Starts are multiplied by the sums of x, so that codes need no subtraction.
template <Format F, int P, int R>
inline void dot_rounded_layout(const uint8_t* const* rows, int64_t blocks, const Rounded& x, float* out) {
    constexpr int kOwn = kGroups<F>, kOfPart = kOwn / kParts<F>;
    V sums[R];
    float rests[R][kOwn] = {};
    for (int r = 0; r < R; ++r) sums[r] = Isa::zero();
    for (int64_t b = 0; b < blocks; ++b) {
        look_ahead<F, R>(rows + kRowsAhead, b);
        for (int r = 0; r < R; ++r) {
            const uint8_t* block = rows[r] + b * block_bytes(F);
            const Terms<F> terms(block);
            float scales[kOwn];
            for (int g = 0; g < kOwn; ++g) {
                scales[g] = terms.scales[g] * x.scales[b * kOwn + g];
                if constexpr (kHasStarts<F>) rests[r][g] += terms.starts[g] * x.sums[b * kOwn + g];
            }
#pragma GCC unroll 8
            for (int part = 0; part < kParts<F>; ++part)
                sums[r] = Isa::template add_products<F, P>(codes_at<F>(block, part), x, (b * kParts<F> + part) * kBlock,
                                                           scales + part * kOfPart, sums[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
        out[r] = Isa::sum(sums[r]);
        for (int g = 0; g < kOwn; ++g) out[r] += rests[r][g];
    }
}

void dot_rounded(Format format, const uint8_t* const* rows, int64_t count, int64_t length, const Rounded& x,
                 float* out) {
    over_rounded_rows(format, rows, count, length, x,
                      [&](auto type, auto planes, auto taken, int64_t i) {
                          constexpr Format F = decltype(type)::value;
                          constexpr int P = decltype(planes)::value, R = decltype(taken)::value;
                          const int64_t blocks = blocks_of(length, block_values(F));
                          if constexpr (has_layout(F))
                              dot_rounded_layout<F, P, R>(rows + i, blocks, x, out + i);
                          else
                              dot_rounded_rows<F, P, R>(rows + i, blocks, x, out + i);
                      });
}

}  // namespace
}  // namespace coldpress
