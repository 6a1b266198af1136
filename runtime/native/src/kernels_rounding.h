// Rounds 32 values to whole numbers and a scale, and loops over rows for products with them. Include after
// kernels_body.h; like there, everything is in an anonymous namespace.

namespace coldpress {
namespace {

// Groups whose largest magnitude is below this become zeros, because its inverse would overflow.
constexpr float kSmallestPeak = 1e-30f;

// Rounds 32 values to multiples of a scale, the largest magnitude to 127 (or in two planes to 32512 = 256 * 127; `low`
// is not touched for one plane). Returns the scale; not-a-number if a value is infinite or not-a-number.
template <int P>
inline float round_group(const float* x, int8_t* high, int8_t* low) {
    int32_t bits[kBlock], peak_bits = 0;
    __builtin_memcpy(bits, x, sizeof bits);
    for (int i = 0; i < kBlock; ++i) {  // magnitudes are ordered as their bits; not-a-number comes last
        const int32_t magnitude = bits[i] & 0x7FFFFFFF;
        peak_bits = magnitude > peak_bits ? magnitude : peak_bits;
    }
    float peak;
    __builtin_memcpy(&peak, &peak_bits, sizeof peak);
    const bool finite = peak_bits < 0x7F800000, used = finite && peak >= kSmallestPeak;
    constexpr float most = P == 2 ? 32512.0f : 127.0f;
    const float inverse = used ? most / peak : 0.0f;
    int32_t numbers[kBlock];
    for (int i = 0; i < kBlock; ++i) {
        const float shifted = (finite ? x[i] : 0.0f) * inverse + 12582912.0f;  // as in exp_negative
        int32_t number;
        __builtin_memcpy(&number, &shifted, sizeof number);
        numbers[i] = number - 0x4B400000;
    }
    for (int i = 0; i < kBlock; ++i) {
        const int32_t upper = P == 2 ? (numbers[i] + 128) >> 8 : numbers[i];
        high[i] = static_cast<int8_t>(upper);
        if constexpr (P == 2) low[i] = static_cast<int8_t>(numbers[i] - 256 * upper);
    }
    return finite ? (used ? peak / most : 0.0f) : __builtin_nanf("");
}

template <int P>
inline float sum_of(const int8_t* high, const int8_t* low, int64_t count) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += P == 2 ? 256 * high[i] + low[i] : high[i];
    return static_cast<float>(sum);
}

// Rounds for rows of a format with a layout whose groups have `group` values, and pads all with zeros.
template <int P>
inline void round_groups(int64_t group, float factor, const float* x, int64_t blocks, const Rounded& out) {
    const float zeros[kBlock] = {};
    for (int64_t b = 0; b < blocks_of(blocks, kRoundedBlocks) * kRoundedBlocks; ++b) {
        int8_t *const high = out.planes[0] + b * kBlock, *const low = P == 2 ? out.planes[1] + b * kBlock : nullptr;
        const float scale = round_group<P>(b < blocks ? x + b * kBlock : zeros, high, low);
        for (int64_t at = 0; at < kBlock; at += group) {
            const int64_t first = b * kBlock + at, groups = kPiece / group;
            float* const own = out.scales + first / kPiece * 2 * groups + first % kPiece / group;
            own[0] = scale;
            own[groups] = factor * scale * sum_of<P>(high + at, P == 2 ? low + at : nullptr, group);
        }
    }
}

inline void round_layout(Format format, int zero, const float* x, int64_t blocks, const Rounded& out) {
    const int64_t group = layout_of(format).group;
    const float factor = start_factor(format, zero);
    const auto round = out.num_planes == 2 ? round_groups<2> : round_groups<1>;
    round(group, factor, x, blocks, out);
}

// Calls `step` with the format, which is not fp16, and the number of planes, as types.
template <typename Step>
inline void over_planes(Format format, const Rounded& x, const Step& step) {
    with_format(format, [&](auto type) {
        if constexpr (decltype(type)::value != Format::fp16) {
            if (x.num_planes == 2) return step(type, Count<2>{});
            step(type, Count<1>{});
        }
    });
}

}  // namespace
}  // namespace coldpress
