// The inner loops for several vectors at once, over the same `Isa` and behind kernels_body.h: a row's values are unpacked
// once for kTokens of the vectors. A row and a vector go through the operations of dot_rows in their order, so that the
// result has the bits that it has alone.

namespace coldpress {
namespace {

constexpr int kTokens = Isa::kWidth >= 16 ? 4 : 2;  // vectors at a time: as many as there are registers for

template <Format F>
inline V times_values(const V* values, V scale, const float* x, V sum) {
    if constexpr (F == Format::fp16) {
        for (int i = 0; i < kVectors; ++i) sum = Isa::fma(values[i], Isa::load(x + i * Isa::kWidth), sum);
        return sum;
    } else {
        V part = Isa::mul(values[0], Isa::load(x));
        for (int i = 1; i < kVectors; ++i) part = Isa::fma(values[i], Isa::load(x + i * Isa::kWidth), part);
        return Isa::fma(scale, part, sum);
    }
}

template <Format F>
inline V scale_of(const uint8_t* block) {
    if constexpr (F == Format::fp16)
        return Isa::zero();  // has none, and is not asked for one
    else
        return Isa::template scale<F>(block);
}

// out[r * T + t] = dot(rows[r], x[t])
template <Format F, int R, int T>
inline void dot_tile(const uint8_t* const* rows, const uint8_t* const* next, int64_t length, const float* const* x,
                     float* out) {
    const int64_t whole = whole_blocks<F>(length);
    V sums[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) sums[r][t] = Isa::zero();
    const auto add = [&](int64_t block, int r, const uint8_t* bytes) {
        V values[kVectors];
        Isa::template unpack<F>(bytes, values);
        const V scale = scale_of<F>(bytes);
        for (int t = 0; t < T; ++t)
            sums[r][t] = times_values<F>(values, scale, x[t] + block * kBlock, sums[r][t]);
    };
    for (int64_t b = 0; b < whole; ++b) {
        if (b % kStride == 0) look_ahead<F, R>(next, b);
        for (int r = 0; r < R; ++r) add(b, r, rows[r] + b * block_bytes(F));
    }
    if (F == Format::fp16 && length % kBlock != 0)
        for (int r = 0; r < R; ++r)
            add(whole, r, Tail(rows[r] + whole * block_bytes(F), length % kBlock).bytes);
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) out[r * T + t] = Isa::sum(sums[r][t]);
}

// out[t][i] = dot(row i, x[t]) of T vectors
template <Format F, int T>
void dot_tokens_format(const uint8_t* const* rows, int64_t count, int64_t length, const float* const* x,
                       float* const* out) {
    over_rows<F>(rows, count, length, [&](auto taken, int64_t i, const uint8_t* const* next) {
        constexpr int R = decltype(taken)::value;
        float found[R * T];
        dot_tile<F, R, T>(rows + i, next, length, x, found);
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) out[t][i + r] = found[r * T + t];
    });
}

void dot_tokens(Format format, const uint8_t* const* rows, int64_t count, int64_t length, int tokens,
                const float* const* x, float* const* out) {
    with_format(format, [&](auto type) {
        constexpr Format F = decltype(type)::value;
        int t = 0;
        for (; t + kTokens <= tokens; t += kTokens)
            dot_tokens_format<F, kTokens>(rows, count, length, x + t, out + t);
        for (; t < tokens; ++t) dot_tokens_format<F, 1>(rows, count, length, x + t, out + t);
    });
}

}  // namespace
}  // namespace coldpress
