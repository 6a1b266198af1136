// Products with many rows, split over threads. All arguments are checked by the caller (module.cpp).
#pragma once

#include <cstdint>

#include "formats.h"

namespace coldpress {

// Rows that share a format and a length: row i begins at base + index(i) * stride, index(i) = slots[i], or i without.
struct Rows {
    const uint8_t* base;
    int64_t stride;
    const int32_t* slots;
    int64_t count;
    int64_t length;
    Format format;

    const uint8_t* at(int64_t i) const { return base + (slots ? slots[i] : i) * stride; }
};

// out[i] = dot(row i, x[length])
void dot(const Rows& rows, const float* x, float* out, int threads);

// out[length] = sum over i, in order, of coefficients[i] * row i
void axpy(const Rows& rows, const float* coefficients, float* out, int threads);

// out[i, length] = row i
void decode(const Rows& rows, float* out, int threads);

}  // namespace coldpress
