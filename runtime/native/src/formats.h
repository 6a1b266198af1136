// The storage formats of weights, as runtime/quantization/*.py define them, seen from the kernels: every format is
// a run of blocks of 32 values, or of 256. fp16 alone may end inside a block; the other formats of 32 are padded by the
// encoder, and rows of blocks of 256 have a multiple of 256 values.
#pragma once

#include <cstdint>

namespace coldpress {

// All but the first two have a Layout.
enum class Format {
    fp16, int8_group32, int4_group32, q4_k, q4_1, q6_k, q5_k, q5_0, q5_1, iq4_nl, q3_k, q2_k
};

constexpr int64_t kBlock = 32;

// A block of llama.cpp's formats: value = scale * code + start. Each `group` values share a scale, which is the block's,
// in K formats times a small number of the group; and a start, which is -zero times the scale, or a minimum, found
// likewise and subtracted in K formats. Numbers `at` are bytes of the block. A code's low and high bits stand apart
// (kernels_blocks.h); codes of iq4_nl number its levels.
struct Layout {
    int values, bytes, group;
    int scale_at, minimum_at, groups_at;  // float16, float16, and the groups' numbers; kNone: there is none
    int low_bits, low_at, high_bits, high_at, zero;
};

constexpr int kNone = -1;

// The levels of iq4_nl.
constexpr int8_t kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Its `values` are 0 for a format without a layout.
constexpr Layout layout_of(Format format) {
    switch (format) {
        case Format::int4_group32:
            return {32, 18, 32, 0, kNone, kNone, 4, 2, 0, kNone, 8};
        case Format::q4_1:
            return {32, 20, 32, 0, 2, kNone, 4, 4, 0, kNone, 0};
        case Format::q5_0:
            return {32, 22, 32, 0, kNone, kNone, 4, 6, 1, 2, 16};
        case Format::q5_1:
            return {32, 24, 32, 0, 2, kNone, 4, 8, 1, 4, 0};
        case Format::iq4_nl:
            return {32, 18, 32, 0, kNone, kNone, 4, 2, 0, kNone, 0};
        case Format::q2_k:
            return {256, 84, 16, 80, 82, 0, 2, 16, 0, kNone, 0};
        case Format::q3_k:
            return {256, 110, 16, 108, kNone, 96, 2, 32, 1, 0, 4};
        case Format::q4_k:
            return {256, 144, 32, 0, 2, 4, 4, 16, 0, kNone, 0};
        case Format::q5_k:
            return {256, 176, 32, 0, 2, 4, 4, 48, 1, 16, 0};
        case Format::q6_k:
            return {256, 210, 16, 208, kNone, 192, 4, 0, 2, 128, 32};
        default:
            return {};
    }
}

constexpr bool has_layout(Format format) { return layout_of(format).values > 0; }

// Values of a block. A row's length is a multiple of it if it is more than kBlock.
constexpr int64_t block_values(Format format) { return has_layout(format) ? layout_of(format).values : kBlock; }

constexpr int64_t block_bytes(Format format) {
    if (has_layout(format)) return layout_of(format).bytes;
    return format == Format::fp16 ? 64 : 34;
}

constexpr int64_t blocks_of(int64_t length, int64_t values = kBlock) { return (length + values - 1) / values; }

constexpr int64_t row_bytes(Format format, int64_t length) {
    return format == Format::fp16 ? 2 * length : blocks_of(length, block_values(format)) * block_bytes(format);
}

// Throws std::invalid_argument naming the known formats.
Format format_of(const char* name);

// The functions of schemas/model.py's activations; activations with the same function share one name here.
enum class Activation { none, relu, relu2, fatrelu, silu, gelu, gelu_tanh, clamped_swish, clamped_up };

// The function of the gate's products. Throws std::invalid_argument naming the known functions.
Activation activation_of(const char* name);

// The function of up's products in an MLP with this activation of the gate; none for most.
Activation up_activation_of(const char* name);

}  // namespace coldpress
