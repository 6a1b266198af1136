// Products of quantized rows and rounded vectors, over an Isa that also defines
//   Ints (partial sums of 32 bits), products<F>(block, 32 whole numbers of 8 bits) -> Ints, join(high, low) = 256 * high
//   + low, and to_float.
// Include after kernels_body.h; like there, everything is in an anonymous namespace.
#include "kernels_rounding.h"

namespace coldpress {
namespace {

void round_blocks(Format, const float* x, int64_t blocks, const Rounded& out) {
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

void dot_rounded(Format format, const uint8_t* const* rows, int64_t count, int64_t length, const Rounded& x,
                 float* out) {
    over_rounded_rows(format, rows, count, length, x,
                      [&](auto type, auto planes, auto taken, int64_t i) {
                          dot_rounded_rows<decltype(type)::value, decltype(planes)::value, decltype(taken)::value>(
                              rows + i, blocks_of(length), x, out + i);
                      });
}

}  // namespace
}  // namespace coldpress
