// The storage formats of weights, as runtime/quantization/*.py define them, seen from the kernels: every format is
// a run of blocks of 32 values. fp16 alone may end inside a block; the grouped formats are padded by the encoder.
#pragma once

#include <cstdint>

namespace coldpress {

enum class Format { fp16, int8_group32, int4_group32, int3_group32 };

constexpr int64_t kBlock = 32;

// Codes of 2 to 4 bits, packed as runtime/quantization/_bits.py says: value = (step * code - zero) * unit * scale, with a
// whole number in the brackets.
struct Codes {
    int bits, step, zero;
    float unit;
};

constexpr Codes codes_of(Format format) {
    switch (format) {
        case Format::int4_group32:
            return {4, 1, 8, 1.0f};
        case Format::int3_group32:
            return {3, 1, 4, 1.0f};
        default:
            return {};
    }
}

constexpr int64_t block_bytes(Format format) {
    if (format == Format::fp16) return 64;
    return format == Format::int8_group32 ? 34 : 2 + kBlock / 8 * codes_of(format).bits;
}

// The factor of a format's scales.
constexpr float unit_of(Format format) { return codes_of(format).bits == 0 ? 1.0f : codes_of(format).unit; }

constexpr int64_t blocks_of(int64_t length) { return (length + kBlock - 1) / kBlock; }

constexpr int64_t row_bytes(Format format, int64_t length) {
    return format == Format::fp16 ? 2 * length : blocks_of(length) * block_bytes(format);
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
