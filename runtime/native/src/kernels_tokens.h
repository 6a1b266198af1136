// The inner loops of products with one or several vectors, over the same `Isa`, after kernels_body.h: a row's values are
// unpacked once for kTokens vectors. Each row and vector go through the same operations in the same order, however many
// there are, so that the result has the same bits as alone.

namespace coldpress {
namespace {

constexpr int kTokens = Isa::kWidth >= 16 ? 4 : 2;  // vectors at a time: as many as fit the registers

// out[t][first + r] = dot(rows[r], x[t])
template <Format F, int R, int T>
inline void dot_tile(const uint8_t* const* rows, int64_t length, const float* const* x, int64_t first,
                     float* const* out) {
    if constexpr (has_layout(F)) return dot_blocks<F, R, T>(rows, length, x, first, out);
    V sums[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) sums[r][t] = Isa::zero();
    over_chunks<F, R>(rows, length, [&](int64_t chunk, const auto& at) {
        V values[kVectors], inputs[kVectors];
        for (int r = 0; r < R; ++r) {
            Isa::template unpack<F>(at(r), values);
            const V scale = Isa::scale(at(r));
            for (int t = 0; t < T; ++t) {
                load_chunk(x[t], chunk, inputs);
                sums[r][t] = add_products<F>(values, scale, inputs, sums[r][t]);
            }
        }
    });
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) out[t][first + r] = Isa::sum(sums[r][t]);
}

// Products with T vectors. Not inlined, like dot_rounded_pieces.
template <Format F, int T>
[[gnu::noinline]] void dot_group(const uint8_t* const* rows, int64_t count, int64_t length, const float* const* x,
                                 float* const* out) {
    over_rows<F>(rows, count, length, [&](auto taken, int64_t i) {
        dot_tile<F, decltype(taken)::value, T>(rows + i, length, x, i, out);
    });
}

void dot(Format format, const uint8_t* const* rows, int64_t count, int64_t length, int tokens, const float* const* x,
         float* const* out) {
    with_format(format, [&](auto type) {
        constexpr Format F = decltype(type)::value;
        // A row whose blocks have a layout is taken alone, which leaves registers for more vectors.
        constexpr int kMost = has_layout(F) && kTokens > 2 ? 2 * kTokens : kTokens;
        over_groups<kMost>(tokens, [&](auto group, int t) {
            dot_group<F, decltype(group)::value>(rows, count, length, x + t, out + t);
        });
    });
}

// y[t][j] += sum over r, in order, of coefficients[t][first + r] * rows[r][j]
template <Format F, int R, int T>
inline void axpy_tile(const uint8_t* const* rows, int64_t length, const float* const* coefficients, int64_t first,
                      float* const* y) {
    if constexpr (has_layout(F)) return axpy_blocks<F, R, T>(rows, length, coefficients, first, y);
    const float* own[T];  // copies, since a stored vector might be one of the pointers, for all that compilers know
    float* to[T];
    for (int t = 0; t < T; ++t) own[t] = coefficients[t] + first, to[t] = y[t];
    over_chunks<F, R>(rows, length, [&](int64_t chunk, const auto& at) {
        V outputs[T][kVectors], values[kVectors];
        for (int t = 0; t < T; ++t) load_chunk(to[t], chunk, outputs[t]);
        for (int r = 0; r < R; ++r) {
            Isa::template unpack<F>(at(r), values);
            for (int t = 0; t < T; ++t) {
                V coefficient = Isa::set1(own[t][r]);
                if constexpr (F != Format::fp16) coefficient = Isa::mul(coefficient, Isa::scale(at(r)));
                for (int i = 0; i < kVectors; ++i) outputs[t][i] = Isa::fma(coefficient, values[i], outputs[t][i]);
            }
        }
        for (int t = 0; t < T; ++t)
            for (int i = 0; i < kVectors; ++i) Isa::store(to[t] + chunk * kBlock + i * Isa::kWidth, outputs[t][i]);
    });
}

template <Format F, int T>
[[gnu::noinline]] void axpy_group(const uint8_t* const* rows, int64_t count, int64_t length,
                                  const float* const* coefficients, float* const* y) {
    over_rows<F>(rows, count, length, [&](auto taken, int64_t i) {
        axpy_tile<F, decltype(taken)::value, T>(rows + i, length, coefficients, i, y);
    });
}

void axpy(Format format, const uint8_t* const* rows, int64_t count, int64_t length, int tokens,
          const float* const* coefficients, float* const* y) {
    with_format(format, [&](auto type) {
        constexpr Format F = decltype(type)::value;
        over_groups<kTokens>(tokens, [&](auto group, int t) {
            axpy_group<F, decltype(group)::value>(rows, count, length, coefficients + t, y + t);
        });
    });
}

}  // namespace
}  // namespace coldpress
