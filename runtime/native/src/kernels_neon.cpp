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
        } else if constexpr (F == Format::int8_group32) {
            widen(vreinterpretq_s8_u8(vld1q_u8(block + 2)), values);
            widen(vreinterpretq_s8_u8(vld1q_u8(block + 18)), values + 4);
        } else {
            const uint8x16_t pairs = vld1q_u8(block + 2);
            const int8x16_t eight = vdupq_n_s8(8);
            widen(vsubq_s8(vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15))), eight), values);
            widen(vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4)), eight), values + 4);
        }
    }
    template <Format F>
    static V scale(const uint8_t* block) {
        uint16_t half;
        __builtin_memcpy(&half, block, sizeof half);
        return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half)));
    }

    using Ints = int32x4_t;
    static Ints add_products(Ints sums, int8x16_t codes, int8x16_t numbers) {
#if defined(__ARM_FEATURE_DOTPROD)
        return vdotq_s32(sums, codes, numbers);
#else
        const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(numbers));
        return vpadalq_s16(vpadalq_s16(sums, low), vmull_s8(vget_high_s8(codes), vget_high_s8(numbers)));
#endif
    }
    template <Format F>
    static Ints products(const uint8_t* block, const int8_t* x) {
        int8x16_t first, second;
        if constexpr (F == Format::int8_group32) {
            first = vreinterpretq_s8_u8(vld1q_u8(block + 2));
            second = vreinterpretq_s8_u8(vld1q_u8(block + 18));
        } else {
            const uint8x16_t pairs = vld1q_u8(block + 2);
            const int8x16_t eight = vdupq_n_s8(8);
            first = vsubq_s8(vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15))), eight);
            second = vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4)), eight);
        }
        return add_products(add_products(vdupq_n_s32(0), first, vld1q_s8(x)), second, vld1q_s8(x + 16));
    }
    static Ints join(Ints high, Ints low) { return vaddq_s32(vshlq_n_s32(high, 8), low); }
    static V to_float(Ints sums) { return vcvtq_f32_s32(sums); }
};

}  // namespace
}  // namespace coldpress

#include "kernels_chunks.h"
#include "kernels_body.h"
#include "kernels_integers.h"
#include "kernels_activations.h"
#include "kernels_tokens.h"
#include "kernels_matrix.h"

namespace coldpress {
const Kernels kNeonKernels{"neon", arrange, restore, dot, axpy, round_blocks, dot_rounded, decode, exp_sum, activate,
                               dot_tokens, multiply, decode_panels};
}
