// The storage formats of weights, as runtime/quantization/*.py define them, seen from the kernels: every format is
// a run of blocks of 32 values. fp16 alone may end inside a block; the grouped formats are padded by the encoder.
#pragma once

#include <cstdint>

namespace coldpress {

enum class Format { fp16, int8_group32, int4_group32, int3_group32 };

constexpr int64_t kBlock = 32;

constexpr int64_t block_bytes(Format format) {
    switch (format) {
        case Format::fp16:
            return 64;
        case Format::int8_group32:
            return 34;
        case Format::int4_group32:
            return 18;
        case Format::int3_group32:
            return 14;
    }
    return 0;
}

constexpr int64_t blocks_of(int64_t length) { return (length + kBlock - 1) / kBlock; }

constexpr int64_t row_bytes(Format format, int64_t length) {
    return format == Format::fp16 ? 2 * length : blocks_of(length) * block_bytes(format);
}

// Throws std::invalid_argument naming the known formats.
Format format_of(const char* name);

// The functions of schemas/model.py's activations; activations with the same function share one name here.
enum class Activation { relu, relu2, fatrelu, silu, gelu, gelu_tanh };

// Throws std::invalid_argument naming the known functions.
Activation activation_of(const char* name);

}  // namespace coldpress
