#include "encode.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats.h"

namespace coldpress {
namespace {

constexpr float kTooLarge = 65520.0f;  // the smallest number that rounds to infinity in half precision

// Rounds a number from 0 to below kTooLarge to half precision, to nearest even; returns its bits.
uint16_t half_of(float value) {
    constexpr float smallest_normal = 0x1p-14f;
    uint32_t bits;
    if (value < smallest_normal) {
        const float shifted = value + 0.5f;  // rounds: the sum's last place is 2^-24, as in subnormal halves
        std::memcpy(&bits, &shifted, sizeof bits);
        return static_cast<uint16_t>(bits - 0x3F000000);
    }
    std::memcpy(&bits, &value, sizeof bits);
    bits += 0xFFF + ((bits >> 13) & 1);
    return static_cast<uint16_t>((bits - (112u << 23)) >> 13);
}

// The largest magnitude of a block; not-a-number if the block has one.
float peak_of(const float* x) {
    int32_t bits[kBlock], most = 0;
    std::memcpy(bits, x, sizeof bits);
    for (int i = 0; i < kBlock; ++i) {  // magnitudes are ordered as their bits
        const int32_t magnitude = bits[i] & 0x7FFFFFFF;
        most = magnitude > most ? magnitude : most;
    }
    float peak;
    std::memcpy(&peak, &most, sizeof peak);
    return peak;
}

float encode_block(const float* x, uint8_t* out) {
    const float scale = peak_of(x) / 127.0f;
    if (!(scale < kTooLarge)) return scale;
    const float quotient = 1.0f / scale, inverse = std::isinf(quotient) ? 0.0f : quotient;
    int8_t codes[kBlock];
    for (int i = 0; i < kBlock; ++i) {  // ties round away from zero
        const float level = x[i] * inverse;
        const int32_t whole = static_cast<int32_t>(level);
        const float rest = level - static_cast<float>(whole);
        codes[i] = static_cast<int8_t>(whole + (rest >= 0.5f) - (rest <= -0.5f));
    }
    const uint16_t half = half_of(scale);
    std::memcpy(out, &half, sizeof half);
    std::memcpy(out + sizeof half, codes, sizeof codes);
    return scale;
}

}  // namespace

float encode_int8(const float* values, int64_t count, int64_t length, uint8_t* out) {
    constexpr int64_t bytes = block_bytes(Format::int8_group32);
    const int64_t whole = length / kBlock, rest = length % kBlock;
    float largest = 0.0f;
    const auto note = [&largest](float scale) {
        if (!std::isnan(largest) && !(scale <= largest)) largest = scale;
    };
    for (int64_t row = 0; row < count; ++row, values += length) {
        for (int64_t b = 0; b < whole; ++b, out += bytes) note(encode_block(values + b * kBlock, out));
        if (rest == 0) continue;
        float last[kBlock] = {};
        std::copy_n(values + whole * kBlock, rest, last);
        note(encode_block(last, out));
        out += bytes;
    }
    return largest;
}

}  // namespace coldpress
