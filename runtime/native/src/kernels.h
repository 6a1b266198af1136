// The table of inner loops of one instruction set. Callers own all checks: pointers, bounds and lengths are valid here.
//
// Conventions: a row is a pointer to the bytes of one slice, at any alignment; `length` is its number of values.
// Vectors of float32 (x, y) are padded with zeros to a multiple of 32 values. Sums are float32. A row's result never
// depends on which rows are computed beside it, so that the split over threads changes no bit.
#pragma once

#include <cstdint>

#include "formats.h"

namespace coldpress {

struct Kernels {
    const char* name;
    // out[i] = dot(row i, x)
    void (*dot)(Format, const uint8_t* const* rows, int64_t count, int64_t length, const float* x, float* out);
    // y[j] += sum over i, in order, of coefficients[i] * row i [j]
    void (*axpy)(Format, const uint8_t* const* rows, int64_t count, int64_t length, const float* coefficients,
                 float* y);
    // out[j] = row[j], for j < length: `out` needs no padding
    void (*decode)(Format, const uint8_t* row, int64_t length, float* out);
    // values[i] = exp(values[i] - peak); returns their sum. Pairs to a stable softmax where peak is the maximum.
    float (*exp_sum)(float* values, int64_t count, float peak);
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;
#endif

}  // namespace coldpress
