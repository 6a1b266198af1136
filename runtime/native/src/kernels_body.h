// The inner loops, written once over an instruction set `Isa` that the including source defines beforehand:
//   V (a vector of kWidth floats), zero, set1, load, store, add, mul, fma(a, b, c) = a * b + c, sum, prefetch, and for
//   formats F without a layout: unpack<F>(block, V[32 / kWidth]) -> unscaled values, and scale(block) of int8_group32;
// and over the blocks of kernels_blocks.h. A chunk is what the loops take of a row at a time: a block, or a piece of 256
// values of blocks with a layout.
//
// Everything is in an anonymous namespace, and no standard header with inline functions is included: the linker keeps
// one copy of a shared inline function, which might be compiled with AVX-512 and crash on a machine without it.

#include "kernels_blocks.h"

namespace coldpress {
namespace {

template <Format F>
constexpr int64_t kChunkBlocks = has_layout(F) ? kPiece / block_values(F) : 1;
template <Format F>
constexpr int64_t kChunkBytes = kChunkBlocks<F> * block_bytes(F);
constexpr int kVectors = static_cast<int>(kBlock) / Isa::kWidth;  // of a block
constexpr int kRows = 4;  // rows at a time: x (or y) is loaded once for all of them
static_assert(kRows == kRowsAhead, "what is fetched while other rows are computed");
constexpr int64_t kLine = 64;
template <Format F>
constexpr int64_t kStride = has_layout(F) ? kPiece / block_values(F) : 4;  // blocks between two looks ahead

// Prefetches the same kStride<F> blocks of the next rows, each cache line once. The hardware prefetcher does not help:
// rows are not adjacent, and it does not follow four rows at once even if they are. Always inlined, like Isa::prefetch:
// GCC drops calls of a function that only prefetches.
template <Format F, int R>
[[gnu::always_inline]] inline void look_ahead(const uint8_t* const* next, int64_t block) {
    constexpr int64_t bytes = block_bytes(F);
    if (block % kStride<F> != 0) return;
    for (int r = 0; r < R; ++r)
        for (int64_t at = 0; at < kStride<F> * bytes; at += kLine) Isa::prefetch(next[r] + block * bytes + at);
}

// Prefetches the very first rows, which no earlier step has prefetched.
template <Format F, int R>
[[gnu::always_inline]] inline void look_at(const uint8_t* const* rows, int64_t length) {
    for (int64_t b = 0; b < length / block_values(F); b += kStride<F>) look_ahead<F, R>(rows, b);
}

// A count and a format as types, for templates that are instantiated for several of them.
template <int N>
struct Count {
    static constexpr int value = N;
};
template <Format F>
struct FormatType {
    static constexpr Format value = F;
};

template <int T, class Act>
void over_rest(int left, int first, const Act& act) {
    if constexpr (T > 0) {
        if (left == T) return act(Count<T>{}, first);
        over_rest<T - 1>(left, first, act);
    }
}

// Calls act(T, first) for groups of kMost vectors, and for the rest together.
template <int kMost, class Act>
void over_groups(int tokens, const Act& act) {
    int t = 0;
    for (; t + kMost <= tokens; t += kMost) act(Count<kMost>{}, t);
    over_rest<kMost - 1>(tokens - t, t, act);
}

// Calls `run` with the format as a type.
template <typename Run>
inline void with_format(Format format, const Run& run) {
    switch (format) {
        case Format::fp16:
            return run(FormatType<Format::fp16>{});
        case Format::int8_group32:
            return run(FormatType<Format::int8_group32>{});
        case Format::int4_group32:
            return run(FormatType<Format::int4_group32>{});
        case Format::q4_k:
            return run(FormatType<Format::q4_k>{});
        case Format::q4_1:
            return run(FormatType<Format::q4_1>{});
        case Format::q6_k:
            return run(FormatType<Format::q6_k>{});
        case Format::q5_k:
            return run(FormatType<Format::q5_k>{});
        case Format::q5_0:
            return run(FormatType<Format::q5_0>{});
        case Format::q5_1:
            return run(FormatType<Format::q5_1>{});
        case Format::iq4_nl:
            return run(FormatType<Format::iq4_nl>{});
        case Format::q3_k:
            return run(FormatType<Format::q3_k>{});
        case Format::q2_k:
            return run(FormatType<Format::q2_k>{});
    }
}

// Copies the last, partial block of an fp16 row and pads it with zeros, so that no load reads beyond the row.
struct Tail {
    uint8_t bytes[block_bytes(Format::fp16)];
    Tail(const uint8_t* block, int64_t values) : bytes{} {
        __builtin_memcpy(bytes, block, static_cast<size_t>(2 * values));
    }
};

// Calls `step` with a number of rows and the index of the first. The step should prefetch the kRowsAhead rows after
// them.
template <Format F, typename Step>
inline void over_rows(const uint8_t* const* rows, int64_t count, int64_t length, const Step& step) {
    int64_t i = 0;
    if (count > 0) look_at<F, kRows>(rows, length);
    // A row whose blocks have a layout is taken alone: unpacking a piece takes longer than loading x again.
    if constexpr (!has_layout(F))
        for (; i + kRows <= count; i += kRows) step(Count<kRows>{}, i);
    for (; i < count; ++i) step(Count<1>{}, i);
}

// Calls `step` with the index of each whole chunk and a function at(r), the chunk's address in row r. Returns their
// number.
template <Format F, int R, typename Step>
inline int64_t over_whole_chunks(const uint8_t* const* rows, int64_t length, const Step& step) {
    constexpr int64_t bytes = kChunkBytes<F>;
    const int64_t whole = row_bytes(F, length) / bytes;
    for (int64_t c = 0; c < whole; ++c) {
        look_ahead<F, R>(rows + kRowsAhead, c * kChunkBlocks<F>);
        step(c, [&](int r) { return rows[r] + c * bytes; });
    }
    return whole;
}

// The same; the rest of a row is one more chunk, padded with zeros.
template <Format F, int R, typename Step>
inline void over_chunks(const uint8_t* const* rows, int64_t length, const Step& step) {
    constexpr int64_t bytes = kChunkBytes<F>;
    const int64_t whole = over_whole_chunks<F, R>(rows, length, step), rest = row_bytes(F, length) % bytes;
    if (rest == 0) return;
    uint8_t last[R][bytes] = {};
    for (int r = 0; r < R; ++r) __builtin_memcpy(last[r], rows[r] + whole * bytes, static_cast<size_t>(rest));
    step(whole, [&](int r) { return last[r]; });
}

// sum + values * x; fp16 has no scale
template <Format F>
inline V add_products(const V* values, V scale, const V* x, V sum) {
    if constexpr (F == Format::fp16) {
        for (int i = 0; i < kVectors; ++i) sum = Isa::fma(values[i], x[i], sum);
        return sum;
    } else {
        V part = Isa::mul(values[0], x[0]);
        for (int i = 1; i < kVectors; ++i) part = Isa::fma(values[i], x[i], part);
        return Isa::fma(scale, part, sum);
    }
}

inline void load_chunk(const float* x, int64_t chunk, V* values) {
    for (int i = 0; i < kVectors; ++i) values[i] = Isa::load(x + chunk * kBlock + i * Isa::kWidth);
}

// Calls step(part, its values) for each 32 values of a piece.
template <Format F, typename Step>
[[gnu::always_inline]] inline void over_parts(const uint8_t* piece, const Step& step) {
    const Unit<F> unit(piece);
    const auto take = [&](int part) __attribute__((always_inline)) {
        V values[kVectors];
        unit.unpack(part, values);
        step(part, values);
    };
    if constexpr (Unit<F>::kUnrolled) {
#pragma GCC unroll 8
        for (int part = 0; part < kParts; ++part) take(part);
    } else {
        for (int part = 0; part < kParts; ++part) take(part);
    }
}

// out[t][first + r] = dot(rows[r], x[t]) of rows whose blocks have a layout
template <Format F, int R, int T>
inline void dot_blocks(const uint8_t* const* rows, int64_t length, const float* const* x, int64_t first,
                       float* const* out) {
    V sums[R][T][4];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t)
            for (int i = 0; i < 4; ++i) sums[r][t][i] = Isa::zero();
    over_chunks<F, R>(rows, length, [&](int64_t chunk, const auto& at) {
        for (int r = 0; r < R; ++r) {
            V own[T][4];
            for (int t = 0; t < T; ++t)
                for (int i = 0; i < 4; ++i) own[t][i] = sums[r][t][i];
            over_parts<F>(at(r), [&](int part, const V* values) __attribute__((always_inline)) {
                const int64_t place = chunk * kPiece + part * kBlock;
                for (int t = 0; t < T; ++t)
                    for (int i = 0; i < kVectors; ++i) {
                        V& sum = own[t][i % 2 + part % 2 * 2];
                        sum = Isa::fma(values[i], Isa::load(x[t] + place + i * Isa::kWidth), sum);
                    }
            });
            for (int t = 0; t < T; ++t)
                for (int i = 0; i < 4; ++i) sums[r][t][i] = own[t][i];
        }
    });
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) {
            const V* const own = sums[r][t];
            out[t][first + r] = Isa::sum(Isa::add(Isa::add(own[0], own[1]), Isa::add(own[2], own[3])));
        }
}

// y[t][j] += sum over r, in order, of coefficients[t][first + r] * rows[r][j], of rows whose blocks have a layout
template <Format F, int R, int T>
inline void axpy_blocks(const uint8_t* const* rows, int64_t length, const float* const* coefficients, int64_t first,
                        float* const* y) {
    over_chunks<F, R>(rows, length, [&](int64_t chunk, const auto& at) {
        for (int r = 0; r < R; ++r)
            over_parts<F>(at(r), [&](int part, const V* values) __attribute__((always_inline)) {
                for (int t = 0; t < T; ++t) {
                    const V coefficient = Isa::set1(coefficients[t][first + r]);
                    float* const to = y[t] + chunk * kPiece + part * kBlock;
                    for (int i = 0; i < kVectors; ++i) {
                        float* const place = to + i * Isa::kWidth;
                        Isa::store(place, Isa::fma(coefficient, values[i], Isa::load(place)));
                    }
                }
            });
    });
}

template <Format F>
inline void decode_block(const uint8_t* block, float* out) {
    V values[kVectors];
    Isa::template unpack<F>(block, values);
    for (int i = 0; i < kVectors; ++i) {
        if constexpr (F != Format::fp16) values[i] = Isa::mul(values[i], Isa::scale(block));
        Isa::store(out + i * Isa::kWidth, values[i]);
    }
}

// What decode_format does with a row whose blocks have a layout.
template <Format F>
void decode_pieces(const uint8_t* row, int64_t length, int64_t stride, bool padded, float* out) {
    const uint8_t* rows[1 + kRowsAhead];
    for (const uint8_t*& each : rows) each = row;
    over_chunks<F, 1>(rows, length, [&](int64_t piece, const auto& at) {
        over_parts<F>(at(0), [&](int part, const V* values) {
            const int64_t b = piece * kParts + part, rest = length - b * kBlock;
            float last[kBlock];
            float* const to = padded || rest >= kBlock ? out + b * stride : last;
            if (rest <= 0) return;
            for (int i = 0; i < kVectors; ++i) Isa::store(to + i * Isa::kWidth, values[i]);
            if (to == last) __builtin_memcpy(out + b * stride, last, static_cast<size_t>(rest) * sizeof(float));
        });
    });
}

template <Format F>
void decode_format(const uint8_t* row, int64_t length, int64_t stride, bool padded, float* out) {
    if constexpr (has_layout(F)) return decode_pieces<F>(row, length, stride, padded, out);
    constexpr int64_t bytes = block_bytes(F);
    const int64_t whole = length / kBlock, rest = length % kBlock;
    for (int64_t b = 0; b < whole; ++b) decode_block<F>(row + b * bytes, out + b * stride);
    if (rest == 0) return;
    float last[kBlock];
    float* const to = padded ? out + whole * stride : last;
    if constexpr (F == Format::fp16)
        decode_block<F>(Tail(row + whole * bytes, rest).bytes, to);
    else
        decode_block<F>(row + whole * bytes, to);
    if (!padded) __builtin_memcpy(out + whole * stride, last, static_cast<size_t>(rest) * sizeof(float));
}

// exp(x) for x <= 0 to 2 ulp: 2^k * p(r), k = round(x / ln 2), |r| <= ln(2) / 2, p of degree 6. No branches, so that
// the compiler turns the loop below into vectors. Below -87 the result is 0 (it would not be a normal number).
inline float exp_negative(float x) {
    const float clamped = x < -87.0f ? -87.0f : x;
    const float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number in the low bits
    const float k = shifted - 12582912.0f;
    const float r = (clamped - k * 0.693359375f) + k * 2.12194440e-4f;
    float p = 1.3888889e-3f;
    p = p * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits;
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4B400000 + 127) << 23;
    float power;
    __builtin_memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

inline float exp_sum(float* values, int64_t count, float peak) {
    constexpr int lanes = 16;
    float sums[lanes] = {};
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes)
        for (int lane = 0; lane < lanes; ++lane) {
            const float value = exp_negative(values[i + lane] - peak);
            values[i + lane] = value;
            sums[lane] += value;
        }
    for (int lane = 0; i < count; ++i, ++lane) sums[lane] += values[i] = exp_negative(values[i] - peak);
    for (int half = lanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    return sums[0];
}

inline void decode(Format format, const uint8_t* row, int64_t length, int64_t stride, bool padded, float* out) {
    with_format(format, [&](auto type) { decode_format<decltype(type)::value>(row, length, stride, padded, out); });
}

}  // namespace
}  // namespace coldpress
