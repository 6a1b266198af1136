// Products of rows with many vectors: weights are decoded a piece at a time, once for all vectors, and multiplied while
// they are in the cache. The caller checks all arguments (bind_products.cpp).
#pragma once

#include <cstdint>

#include "rows.h"

namespace coldpress {

// out[tokens, count] = x[tokens, length] times the rows, transposed
void matmul(const Rows& rows, const float* x, int64_t tokens, float* out, int threads);

// out[tokens, length] = c[tokens, count] times the rows
void matmul_t(const Rows& rows, const float* c, int64_t tokens, float* out, int threads);

}  // namespace coldpress
