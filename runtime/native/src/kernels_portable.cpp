// Plain C++: for machines without one of the other instruction sets, and the reference in their tests.
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace coldpress {
namespace {

// The compiler's vector types (GCC and Clang), which it maps to the base architecture's, for example SSE2.
typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint16_t Half4 __attribute__((vector_size(8)));

template <typename T>
inline T load_as(const void* p) {
    T value;
    __builtin_memcpy(&value, p, sizeof value);
    return value;
}

// The exponent and mantissa of a half, moved to their places in a float, give the value times 2^-112, for subnormal
// halves, too.
inline Float4 half_to_float(Half4 halves) {
    const Int4 bits = __builtin_convertvector(halves, Int4);
    const Int4 magnitude = bits & 0x7FFF;
    const Int4 moved = magnitude << 13;
    const Float4 value = load_as<Float4>(&moved) * 0x1p112f;
    const Int4 special = (magnitude >= 0x7C00) & 0x7F800000;  // infinity and not-a-number keep their exponent
    const Int4 result = load_as<Int4>(&value) | special | ((bits & 0x8000) << 16);
    return load_as<Float4>(&result);
}

struct Isa {
    using V = Float4;
    static constexpr int kWidth = 4;

    static V zero() { return V{}; }
    static V set1(float value) { return V{value, value, value, value}; }
    static V load(const float* p) { return load_as<V>(p); }
    static void store(float* p, V v) { __builtin_memcpy(p, &v, sizeof v); }
    static V add(V a, V b) { return a + b; }
    static V mul(V a, V b) { return a * b; }
    static V fma(V a, V b, V c) { return a * b + c; }
    static float sum(V v) { return (v[0] + v[2]) + (v[1] + v[3]); }
    [[gnu::always_inline]] static void prefetch(const uint8_t* p) { __builtin_prefetch(p); }

    // Value i of a block of int8_group32, without the scale.
    static int level(const uint8_t* block, int i) { return static_cast<int8_t>(block[2 + i]); }

    template <Format F>
    static void unpack(const uint8_t* block, V* values) {
        if constexpr (F == Format::fp16) {
            for (int i = 0; i < 8; ++i) values[i] = half_to_float(load_as<Half4>(block + 8 * i));
        } else {
            float lanes[kBlock];
            for (int i = 0; i < 16; ++i) {  // plain loops over 16 bytes are what compilers turn into vectors best
                lanes[i] = static_cast<float>(level(block, i));
                lanes[i + 16] = static_cast<float>(level(block, i + 16));
            }
            for (int i = 0; i < 8; ++i) values[i] = load(lanes + kWidth * i);
        }
    }
    static float half(const uint8_t* p) {
        const uint32_t bits = load_as<uint16_t>(p), magnitude = bits & 0x7FFF, moved = magnitude << 13;
        const float value = load_as<float>(&moved) * 0x1p112f;
        const uint32_t special = magnitude >= 0x7C00 ? 0x7F800000 : 0;
        const uint32_t result = load_as<uint32_t>(&value) | special | ((bits & 0x8000) << 16);
        return load_as<float>(&result);
    }
    static V scale(const uint8_t* block) { return set1(half(block)); }

    using Ints = Int4;
    static constexpr int kSharing = 1;
    static Ints products(const uint8_t* block, const int8_t* x) {
        int32_t lanes[16];
        for (int i = 0; i < 16; ++i) lanes[i] = level(block, i) * x[i] + level(block, i + 16) * x[i + 16];
        return (load_as<Int4>(lanes) + load_as<Int4>(lanes + 4)) +
               (load_as<Int4>(lanes + 8) + load_as<Int4>(lanes + 12));
    }
    static void arrange(int8_t*, int8_t*) {}
    static Ints join(Ints high, Ints low) { return high * 256 + low; }
    static V to_float(Ints sums) { return __builtin_convertvector(sums, V); }

    struct Bytes {
        int8_t numbers[kBlock];
    };
    template <typename Find>
    static Bytes each(const Find& find) {
        Bytes found;
        for (int i = 0; i < kBlock; ++i) found.numbers[i] = static_cast<int8_t>(find(i));
        return found;
    }
    static Bytes field(const uint8_t* p, int shift, int mask) {
        return each([=](int i) { return (shift < 0 ? p[i] << -shift : p[i] >> shift) & mask; });
    }
    static Bytes nibbles(const uint8_t* p) {
        return each([=](int i) { return p[i % 16] >> (i / 16 * 4) & 15; });
    }
    static Bytes bits(const uint8_t* p, int place) {
        return each([=](int i) { return (p[i / 8] >> (i % 8) & 1) << place; });
    }
    static Bytes joined(const Bytes& low, const Bytes& high) {
        return each([&](int i) { return low.numbers[i] | high.numbers[i]; });
    }
    static Bytes levels(const Bytes& codes) {
        return each([&](int i) { return kLevels[codes.numbers[i]]; });
    }
    static void halves(const uint8_t* p, int64_t stride, float* out) {
        for (int i = 0; i < 8; ++i) out[i] = half(p + i * stride);
    }
    static void multiples(float unit, const uint32_t* words, int zero, float* out) {
        for (int i = 0; i < 8; ++i)
            out[i] = unit * static_cast<float>(static_cast<int8_t>(words[i / 4] >> (i % 4 * 8)) - zero);
    }
    static void widen(const Bytes& codes, V* values) {
        float lanes[kBlock];
        for (int i = 0; i < kBlock; ++i) lanes[i] = static_cast<float>(codes.numbers[i]);
        for (int i = 0; i < 8; ++i) values[i] = load(lanes + kWidth * i);
    }
    template <Format F, int P>
    static V add_products(const Bytes& codes, const Rounded& x, int64_t at, const float* scales, V sum) {
        constexpr int kGroup = layout_of(F).group;
        for (int first = 0; first < kBlock; first += kGroup) {
            int32_t lanes[4] = {};
            for (int i = first; i < first + kGroup; ++i) {
                const int32_t high = x.planes[0][at + i];
                lanes[i % 4] += codes.numbers[i] * (P == 2 ? 256 * high + x.planes[1][at + i] : high);
            }
            sum = fma(to_float(load_as<Int4>(lanes)), set1(scales[first / kGroup]), sum);
        }
        return sum;
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
const Kernels kPortableKernels{"portable", dot, axpy, round_blocks, dot_rounded, decode, exp_sum, activate,
                               multiply, add_common_bits};
}
