// Blocks of the formats with a layout (formats.h), over an `Isa` that also defines
//   Bytes (32 signed numbers of 8 bits, in order), field(p, shift, mask) = 32 bytes >> shift & mask, nibbles(p) = the low
//   and then the high halves of 16 bytes, bits(p) = each bit of 4 bytes, raised(codes, high, places) = codes | high <<
//   places, levels(codes) = kLevels[code], half(p) = a float16, and widen(codes, V[32 / kWidth]) to floats.
// A format is data here: where the codes' bits stand, and what a group's numbers are. kernels_chunks.h includes this.

namespace coldpress {
namespace {

using V = Isa::V;

template <Format F>
constexpr Layout kLayout = layout_of(F);
template <Format F>
constexpr int kParts = static_cast<int>(block_values(F) / kBlock);  // of 32 values
template <Format F>
constexpr int kGroups = has_layout(F) ? kLayout<F>.values / kLayout<F>.group : 1;
template <Format F>
constexpr bool kHasStarts = kLayout<F>.minimum_at != kNone || kLayout<F>.zero != 0;

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

// The codes of 32 values of a block; iq4_nl's are its levels.
template <Format F>
[[gnu::always_inline]] inline Isa::Bytes codes_at(const uint8_t* block, int part) {
    constexpr Layout kHas = kLayout<F>;
    if constexpr (kHas.values == kBlock) {
        const typename Isa::Bytes codes = Isa::nibbles(block + kHas.low_at);
        if constexpr (kHas.high_bits > 0) return Isa::raised(codes, Isa::bits(block + kHas.high_at), kHas.low_bits);
        if constexpr (F == Format::iq4_nl) return Isa::levels(codes);
        return codes;
    } else {
        const auto bits = [&](int at, Field field, int count) {
            return Isa::field(block + at + field.at, field.shift, (1 << count) - 1);
        };
        const typename Isa::Bytes codes = bits(kHas.low_at, low_field(F, part), kHas.low_bits);
        if constexpr (kHas.high_bits == 0) return codes;
        return Isa::raised(codes, bits(kHas.high_at, high_field(F, part), kHas.high_bits), kHas.low_bits);
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

// The scales and starts of a block's groups.
template <Format F>
struct Terms {
    float scales[kGroups<F>], starts[kGroups<F>];

    [[gnu::always_inline]] explicit Terms(const uint8_t* block) {
        constexpr Layout kHas = kLayout<F>;
        constexpr bool kHasMinimum = kHas.minimum_at != kNone;
        const float scale = Isa::half(block + kHas.scale_at);
        const float minimum = kHasMinimum ? Isa::half(block + (kHasMinimum ? kHas.minimum_at : 0)) : 0.0f;
        if constexpr (kHas.groups_at == kNone) {
            scales[0] = scale;
            starts[0] = kHasMinimum ? minimum : static_cast<float>(-kHas.zero) * scale;
        } else {
            int8_t numbers[2][16];
            const GroupNumbers found = group_numbers<F>(block);
            __builtin_memcpy(numbers[0], found.scales, sizeof found.scales);
            __builtin_memcpy(numbers[1], found.minima, sizeof found.minima);
            for (int g = 0; g < kGroups<F>; ++g) {
                scales[g] = scale * static_cast<float>(numbers[0][g] - kScaleZero<F>);
                starts[g] = kHasMinimum ? -(minimum * static_cast<float>(numbers[1][g]))
                                        : static_cast<float>(-kHas.zero) * scales[g];
            }
        }
    }
};

// The values of a block. A scale times a code is exact in float32, so a fused addition changes no bit.
template <Format F>
[[gnu::always_inline]] inline void unpack_parts(const uint8_t* block, V* values) {
    constexpr int kVectors = static_cast<int>(kBlock) / Isa::kWidth;
    const Terms<F> terms(block);
    for (int part = 0; part < kParts<F>; ++part) {
        V* const of_part = values + part * kVectors;
        Isa::widen(codes_at<F>(block, part), of_part);
        for (int i = 0; i < kVectors; ++i) {
            const int group = (part * static_cast<int>(kBlock) + i * Isa::kWidth) / kLayout<F>.group;
            const V scale = Isa::set1(terms.scales[group]);
            of_part[i] = kHasStarts<F> ? Isa::fma(of_part[i], scale, Isa::set1(terms.starts[group]))
                                       : Isa::mul(of_part[i], scale);
        }
    }
}

// Large blocks are unpacked by one copy of this code: their values do not fit the registers anyway.
template <Format F>
[[gnu::noinline]] void unpack_large(const uint8_t* block, V* values) {
    unpack_parts<F>(block, values);
}

template <Format F>
inline void unpack_block(const uint8_t* block, V* values) {
    if constexpr (kParts<F> > 1)
        unpack_large<F>(block, values);
    else
        unpack_parts<F>(block, values);
}

}  // namespace
}  // namespace coldpress
