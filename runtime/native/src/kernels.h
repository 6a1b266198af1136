// The table of inner loops of one instruction set. Callers own all checks: pointers, bounds and lengths are valid here.
//
// Conventions: a row is a pointer to the bytes of one slice, at any alignment; `length` is its number of values. The
// array of `count` rows is followed by kRowsAhead more, which are prefetched meanwhile: the rows to be read next, or
// any valid rows. Float32 vectors that rows multiply or are added to (x, y) have room for padded_values(length), and
// zeros behind their end. Sums are float32. A row's result never depends on the rows and vectors computed together with
// it, so that the split over threads changes no bit.
#pragma once

#include <cstdint>

#include "formats.h"

namespace coldpress {

// A vector whose groups of kBlock values are whole numbers times a scale: 8 bits in one plane, or 16 bits in two, as
// 256 * planes[0] + planes[1]. Each instruction set orders values, scales and starts in its own way. For rows of a format
// with a layout values keep their order, and for each kPiece of them, `scales` are those of the format's groups, followed
// by the groups' sums times start_factor (kernels_blocks.h): what a group's minimum is multiplied by.
struct Rounded {
    int num_planes;
    int8_t* planes[2];   // room for kBlock values per block each
    float* scales;       // room for 8 per block
    int32_t* starts[2];  // room for 8 per block; the sums' start values, if codes are read as unsigned
};

// Products of matrices accumulate this many terms before they add a partial sum to the result. Rows of factors are
// padded by 64 bytes, so that the entries of a column do not all map to one set of the cache.
constexpr int64_t kDepth = 256, kDepthStride = kDepth + 16;

constexpr int64_t kPiece = 256;
constexpr int64_t kRoundedBlocks = 8;  // buffers have room for a multiple of this many blocks
constexpr int64_t kRowsAhead = 4;  // fewer arrive too late, more evict other data from the L1 cache

// Room for `length` values.
constexpr int64_t padded_values(int64_t length) {
    constexpr int64_t chunk = kRoundedBlocks * kBlock;
    return (length + chunk - 1) / chunk * chunk;
}

constexpr int kBitRows = 4;  // rows of bits that are compared with as many others at a time

struct Kernels {
    const char* name;
    // out[t][i] = dot(row i, x[t])
    void (*dot)(Format, const uint8_t* const* rows, int64_t count, int64_t length, int tokens, const float* const* x,
                float* const* out);
    // y[t][j] += sum over i, in order, of coefficients[t][i] * row i [j]
    void (*axpy)(Format, const uint8_t* const* rows, int64_t count, int64_t length, int tokens,
                 const float* const* coefficients, float* const* y);
    // Fills `out` from x[blocks * kBlock] for `dot_rounded` with rows of this format, which is not fp16. Products with a
    // group that has an infinity or not-a-number are not-a-number.
    void (*round)(Format, const float* x, int64_t blocks, const Rounded& out);
    // out[t][i] = dot(row i, rounded x[t]), all of as many planes: integers inside a group, float32 across groups
    void (*dot_rounded)(Format, const uint8_t* const* rows, int64_t count, int64_t length, int tokens, const Rounded* x,
                        float* const* out);
    // out[b * stride .. + 32) = block b of the row; behind the row's end the format's padding if `padded`, else nothing
    void (*decode)(Format, const uint8_t* row, int64_t length, int64_t stride, bool padded, float* out);
    // values[i] = exp(values[i] - peak); returns their sum. With the maximum as peak this gives a stable softmax.
    float (*exp_sum)(float* values, int64_t count, float peak);
    // values[i] = the activation function of values[i]; `threshold` is fatrelu's, or what values are clamped to
    void (*activate)(Activation, float threshold, float* values, int64_t count);
    // c[i][0..32) += sum over k, in order, of a[i][k] * b[k][0..32); rows of a are kDepthStride apart
    void (*multiply)(const float* a, int64_t count, const float* b, int64_t depth, float* c, int64_t c_stride);
    // sums[i * stride + j] += the bits that `count` words of left[i] and right[j] have in common, for i, j < kBitRows
    void (*add_common_bits)(const uint64_t* const* left, const uint64_t* const* right, int64_t count, int64_t* sums,
                            int64_t stride);
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

// What VNNI changes of kAvx512Kernels.
struct VnniKernels {
    decltype(Kernels::round) round;
    decltype(Kernels::dot_rounded) dot_rounded;
};
extern const VnniKernels kVnniKernels;
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;
#endif

}  // namespace coldpress
