// NEON on aarch64, where half-precision conversion is part of the base architecture.
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace coldpress {
namespace {

struct Isa {
    using V = float32x4_t;
    static constexpr int kWidth = 4;

    static V zero() { return vdupq_n_f32(0.0f); }
    static V set1(float value) { return vdupq_n_f32(value); }
    static V load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, V v) { vst1q_f32(p, v); }
    static V add(V a, V b) { return vaddq_f32(a, b); }
    static V mul(V a, V b) { return vmulq_f32(a, b); }
    static V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
    static float sum(V v) { return vaddvq_f32(v); }
    [[gnu::always_inline]] static void prefetch(const uint8_t* p) { __builtin_prefetch(p); }

    static void widen(int8x16_t bytes, V* values) {
        const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
        values[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
        values[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(low)));
        values[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
        values[3] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)));
    }

    template <Format F>
    static void unpack(const uint8_t* block, V* values) {
        if constexpr (F == Format::fp16) {
            for (int i = 0; i < 8; ++i) values[i] = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(block + 8 * i)));
        } else {
            widen(vreinterpretq_s8_u8(vld1q_u8(block + 2)), values);
            widen(vreinterpretq_s8_u8(vld1q_u8(block + 18)), values + 4);
        }
    }
    static V halves_of(const uint8_t* p) {
        uint16_t bits;
        __builtin_memcpy(&bits, p, sizeof bits);
        return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits)));
    }
    static float half(const uint8_t* p) { return vgetq_lane_f32(halves_of(p), 0); }
    static V scale(const uint8_t* block) { return halves_of(block); }

    using Ints = int32x4_t;
    static Ints add_products(Ints sums, int8x16_t codes, int8x16_t numbers) {
#if defined(__ARM_FEATURE_DOTPROD)
        return vdotq_s32(sums, codes, numbers);
#else
        const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(numbers));
        return vpadalq_s16(vpadalq_s16(sums, low), vmull_s8(vget_high_s8(codes), vget_high_s8(numbers)));
#endif
    }
    static Ints products(const uint8_t* block, const int8_t* x) {
        const int8x16_t first = vreinterpretq_s8_u8(vld1q_u8(block + 2)), last = vreinterpretq_s8_u8(vld1q_u8(block + 18));
        return add_products(add_products(vdupq_n_s32(0), first, vld1q_s8(x)), last, vld1q_s8(x + 16));
    }
    static void arrange(int8_t*, int8_t*) {}
    static Ints join(Ints high, Ints low) { return vaddq_s32(vshlq_n_s32(high, 8), low); }
    static V to_float(Ints sums) { return vcvtq_f32_s32(sums); }

    using Bytes = int8x16x2_t;
    static constexpr int kSharing = 7;
    static Bytes signed_codes(uint8x16_t first, uint8x16_t second) {
        return {{vreinterpretq_s8_u8(first), vreinterpretq_s8_u8(second)}};
    }
    static Bytes field(const uint8_t* p, int shift, int mask) {
        const int8x16_t right = vdupq_n_s8(static_cast<int8_t>(-shift));
        const uint8x16_t kept = vdupq_n_u8(static_cast<uint8_t>(mask));
        return signed_codes(vandq_u8(vshlq_u8(vld1q_u8(p), right), kept),
                            vandq_u8(vshlq_u8(vld1q_u8(p + 16), right), kept));
    }
    static Bytes nibbles(const uint8_t* p) {
        const uint8x16_t pairs = vld1q_u8(p);
        return signed_codes(vandq_u8(pairs, vdupq_n_u8(15)), vshrq_n_u8(pairs, 4));
    }
    static Bytes bits(const uint8_t* p, int place) {
        const uint8x16_t own = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
        const uint8x16_t kept = vdupq_n_u8(static_cast<uint8_t>(1 << place));
        const auto half_of = [own, kept](uint8_t first, uint8_t second) {
            return vandq_u8(vtstq_u8(vcombine_u8(vdup_n_u8(first), vdup_n_u8(second)), own), kept);
        };
        return signed_codes(half_of(p[0], p[1]), half_of(p[2], p[3]));
    }
    static Bytes joined(Bytes low, Bytes high) {
        return {{vorrq_s8(low.val[0], high.val[0]), vorrq_s8(low.val[1], high.val[1])}};
    }
    static Bytes levels(Bytes codes) {
        const int8x16_t table = vld1q_s8(kLevels);
        const auto found = [table](int8x16_t half) { return vqtbl1q_s8(table, vreinterpretq_u8_s8(half)); };
        return {{found(codes.val[0]), found(codes.val[1])}};
    }
    static void halves(const uint8_t* p, int64_t stride, float* out) {
        for (int i = 0; i < 8; ++i) out[i] = half(p + i * stride);
    }
    static void multiples(float unit, const uint32_t* words, int zero, float* out) {
        const int16x8_t bytes = vmovl_s8(vreinterpret_s8_u32(vld1_u32(words)));
        const int16x8_t numbers = vsubq_s16(bytes, vdupq_n_s16(static_cast<int16_t>(zero)));
        vst1q_f32(out, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(numbers))), unit));
        vst1q_f32(out + 4, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(numbers))), unit));
    }
    static void widen(Bytes codes, V* values) {
        widen(codes.val[0], values);
        widen(codes.val[1], values + 4);
    }
    template <int P>
    static Ints half_products(Ints sums, int8x16_t codes, const Rounded& x, int64_t at) {
        if constexpr (P == 1) return add_products(sums, codes, vld1q_s8(x.planes[0] + at));
        const Ints high = add_products(vdupq_n_s32(0), codes, vld1q_s8(x.planes[0] + at));
        return add_products(vaddq_s32(sums, vshlq_n_s32(high, 8)), codes, vld1q_s8(x.planes[1] + at));
    }
    template <Format F, int P>
    static V add_products(Bytes codes, const Rounded& x, int64_t at, const float* scales, V sum) {
        const Ints first = half_products<P>(vdupq_n_s32(0), codes.val[0], x, at);
        if constexpr (layout_of(F).group == kBlock)
            return vfmaq_n_f32(sum, to_float(half_products<P>(first, codes.val[1], x, at + 16)), scales[0]);
        sum = vfmaq_n_f32(sum, to_float(first), scales[0]);
        return vfmaq_n_f32(sum, to_float(half_products<P>(vdupq_n_s32(0), codes.val[1], x, at + 16)), scales[1]);
    }
};

}  // namespace
}  // namespace coldpress

#include "kernels_body.h"
#include "kernels_integers.h"
#include "kernels_activations.h"
#include "kernels_tokens.h"
#include "kernels_matrix.h"
#include "kernels_bits.h"

namespace coldpress {
const Kernels kNeonKernels{"neon", dot, axpy, round_blocks, dot_rounded, decode, exp_sum, activate,
                           multiply, add_common_bits};
}
