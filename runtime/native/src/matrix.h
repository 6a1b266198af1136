// Products of rows and a matrix of many vectors: weights are decoded a piece at a time, each once for all of them, and
// multiplied while they are near. All arguments are checked by the caller (bind_products.cpp).
#pragma once

#include <cstdint>

#include "rows.h"

namespace coldpress {

// out[tokens, count] = x[tokens, length] times the rows, transposed
void matmul(const Rows& rows, const float* x, int64_t tokens, float* out, int threads);

// out[tokens, length] = c[tokens, count] times the rows
void matmul_t(const Rows& rows, const float* c, int64_t tokens, float* out, int threads);

}  // namespace coldpress
