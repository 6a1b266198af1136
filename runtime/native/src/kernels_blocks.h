// Blocks of the formats with a layout (formats.h), in pieces of 256 values: one block, or eight. A format is data here:
// where the codes' bits stand, and what a group's numbers are. Over an `Isa` that also defines
//   Bytes (32 signed numbers of 8 bits, in order), field(p, shift, mask) = 32 bytes >> shift (to the left if negative)
//   & mask, nibbles(p) = the low and then the high halves of 16 bytes, bits(p, place) = each bit of 4 bytes << place,
//   joined(low, high) = low | high, levels(codes) = kLevels[code], widen(codes, V[32 / kWidth]) to floats, half(p) = a
//   float16, halves(p, stride, out) = 8 of them, and multiples(unit, 8 bytes in two words, zero, out) = unit * (byte -
//   zero).
// kernels_body.h includes this.
#pragma once

namespace coldpress {
namespace {

using V = Isa::V;

template <Format F>
constexpr Layout kLayout = layout_of(F);
constexpr int kParts = static_cast<int>(kPiece / kBlock);  // of a piece: 32 values each
template <Format F>
constexpr int kGroups = has_layout(F) ? static_cast<int>(kPiece) / kLayout<F>.group : 1;  // of a piece
template <Format F>
constexpr bool kHasMinima = kLayout<F>.minimum_at != kNone;

// Where bits of 32 values are: in these bytes, from this bit on. Codes of several parts share bytes.
struct Field {
    int at, shift;
};

constexpr Field low_field(Format format, int part) {
    if (layout_of(format).low_bits == 2) return {part / 4 * 32, part % 4 * 2};
    if (format == Format::q6_k) return {part / 4 * 64 + part % 2 * 32, part % 4 / 2 * 4};
    return {part / 2 * 32, part % 2 * 4};
}

constexpr Field high_field(Format format, int part) {
    return layout_of(format).high_bits == 1 ? Field{0, part} : Field{part / 4 * 32, part % 4 * 2};
}

// The codes of 32 values of a piece; iq4_nl's are its levels.
template <Format F>
[[gnu::always_inline]] inline Isa::Bytes codes_at(const uint8_t* piece, int part) {
    constexpr Layout kHas = kLayout<F>;
    if constexpr (kHas.values == kBlock) {
        const uint8_t* block = piece + part * kHas.bytes;
        const typename Isa::Bytes codes = Isa::nibbles(block + kHas.low_at);
        if constexpr (kHas.high_bits > 0) return Isa::joined(codes, Isa::bits(block + kHas.high_at, kHas.low_bits));
        if constexpr (F == Format::iq4_nl) return Isa::levels(codes);
        return codes;
    } else {
        const auto bits = [&](int at, Field field, int count, int place) __attribute__((always_inline)) {
            return Isa::field(piece + at + field.at, field.shift - place, ((1 << count) - 1) << place);
        };
        const typename Isa::Bytes codes = bits(kHas.low_at, low_field(F, part), kHas.low_bits, 0);
        if constexpr (kHas.high_bits == 0) return codes;
        return Isa::joined(codes, bits(kHas.high_at, high_field(F, part), kHas.high_bits, kHas.low_bits));
    }
}

// The small numbers of a K format's groups, as bytes in order: scales, too large by kScaleZero, and minima.
struct GroupNumbers {
    uint32_t scales[4], minima[4];
};

template <Format F>
constexpr int kScaleZero = F == Format::q3_k ? 32 : 0;

template <Format F>
inline GroupNumbers group_numbers(const uint8_t* block) {
    constexpr uint32_t kFour = 0x0F0F0F0F, kSix = 0x3F3F3F3F, kUpper = 0x30303030;
    GroupNumbers found{};
    uint32_t words[4] = {};
    __builtin_memcpy(words, block + kLayout<F>.groups_at, F == Format::q2_k || F == Format::q6_k ? 16 : 12);
    if constexpr (F == Format::q2_k) {
        for (int i = 0; i < 4; ++i) {
            found.scales[i] = words[i] & kFour;
            found.minima[i] = (words[i] >> 4) & kFour;
        }
    } else if constexpr (F == Format::q3_k) {  // the third word has the upper two bits of all
        for (int i = 0; i < 4; ++i) {
            const uint32_t upper = i < 2 ? words[2] << (4 - 2 * i) : words[2] >> (2 * i - 4);
            found.scales[i] = ((words[i % 2] >> (i / 2 * 4)) & kFour) | (upper & kUpper);
        }
    } else if constexpr (F == Format::q6_k) {
        __builtin_memcpy(found.scales, words, sizeof words);
    } else {  // of the last four, the upper two bits stand above those of the first four
        found.scales[0] = words[0] & kSix;
        found.minima[0] = words[1] & kSix;
        found.scales[1] = (words[2] & kFour) | ((words[0] >> 2) & kUpper);
        found.minima[1] = ((words[2] >> 4) & kFour) | ((words[1] >> 2) & kUpper);
    }
    return found;
}

// The scales and minima of a piece's groups; without minima, the scales again.
template <Format F>
struct Terms {
    float scales[kGroups<F>], minima[kGroups<F>];

    [[gnu::always_inline]] explicit Terms(const uint8_t* p) {
        constexpr Layout kHas = kLayout<F>;
        if constexpr (kHas.values == kBlock) {
            Isa::halves(p + kHas.scale_at, kHas.bytes, scales);
            if constexpr (kHasMinima<F>) Isa::halves(p + kHas.minimum_at, kHas.bytes, minima);
        } else {
            const GroupNumbers found = group_numbers<F>(p);
            const float scale = Isa::half(p + kHas.scale_at);
            for (int g = 0; g < kGroups<F>; g += 8) {
                Isa::multiples(scale, found.scales + g / 4, kScaleZero<F>, scales + g);
                if constexpr (kHasMinima<F>)
                    Isa::multiples(Isa::half(p + kHas.minimum_at), found.minima + g / 4, 0, minima + g);
            }
        }
        if constexpr (!kHasMinima<F>) __builtin_memcpy(minima, scales, sizeof scales);
    }
};

// A group's start over its minimum, or over its scale in a format without minima. `zero` is the code of value 0.
constexpr float start_factor(Format format, int zero) {
    if (layout_of(format).minimum_at == kNone) return static_cast<float>(-zero);
    return layout_of(format).groups_at == kNone ? 1.0f : -1.0f;
}

// A piece. A scale times a code is exact in float32, so a fused addition changes no bit.
template <Format F, int kWidth = Isa::kWidth>
struct Unit {
    static constexpr bool kUnrolled = kWidth == 8;
    const uint8_t* piece;
    Terms<F> terms;

    [[gnu::always_inline]] explicit Unit(const uint8_t* p) : piece(p), terms(p) {}
    // Its part's 32 values.
    [[gnu::always_inline]] void unpack(int part, V* values) const {
        Isa::widen(codes_at<F>(piece, part), values);
        for (int i = 0; i < static_cast<int>(kBlock) / kWidth; ++i) {
            constexpr float kFactor = start_factor(F, kLayout<F>.zero);
            const int group = (part * static_cast<int>(kBlock) + i * kWidth) / kLayout<F>.group;
            const V scale = Isa::set1(terms.scales[group]);
            values[i] = kFactor == 0.0f ? Isa::mul(values[i], scale)
                                        : Isa::fma(values[i], scale, Isa::set1(terms.minima[group] * kFactor));
        }
    }
};

}  // namespace
}  // namespace coldpress
