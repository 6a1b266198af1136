// The inner loops of products of matrices, over an `Isa`, after kernels_body.h: tiles of sums stay in registers while
// the loop runs over the depth. Every sum adds terms in the order of the depth, with fused multiply-adds if the
// instruction set has them, so that all such sets give the same bits.

namespace coldpress {
namespace {

constexpr int kTileRows = Isa::kWidth >= 16 ? 12 : Isa::kWidth == 8 ? 6 : 4;  // two vectors each, to fit the registers

// c[m][0..32) += sum over k of a[m][k] * b[k][0..32), for M rows
template <int M>
inline void multiply_tile(const float* a, const float* b, int64_t depth, float* c, int64_t c_stride) {
    constexpr int64_t wide = 2 * Isa::kWidth;
    for (int64_t j = 0; j < kBlock; j += wide) {
        V sums[M][2];
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) sums[m][0] = sums[m][1] = Isa::zero();
        for (int64_t k = 0; k < depth; ++k) {
            const V left = Isa::load(b + k * kBlock + j), right = Isa::load(b + k * kBlock + j + Isa::kWidth);
#pragma GCC unroll 12
            for (int m = 0; m < M; ++m) {
                const V factor = Isa::set1(a[m * kDepthStride + k]);
                sums[m][0] = Isa::fma(factor, left, sums[m][0]);
                sums[m][1] = Isa::fma(factor, right, sums[m][1]);
            }
        }
        const V one = Isa::set1(1.0f);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m)
            for (int half = 0; half < 2; ++half) {
                float* const at = c + m * c_stride + j + half * Isa::kWidth;
                Isa::store(at, Isa::fma(one, sums[m][half], Isa::load(at)));
            }
    }
}

void multiply(const float* a, int64_t count, const float* b, int64_t depth, float* c, int64_t c_stride) {
    int64_t i = 0;
    const auto take = [&](auto rows) {
        constexpr int M = decltype(rows)::value;
        for (; i + M <= count; i += M) multiply_tile<M>(a + i * kDepthStride, b, depth, c + i * c_stride, c_stride);
    };
    take(Count<kTileRows>{});
    take(Count<2>{});
    take(Count<1>{});
}

}  // namespace
}  // namespace coldpress
