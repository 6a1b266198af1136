// The MLP of selected units in one pass: rows of the gate and the up projection, the activation, columns of the down
// projection. The caller checks all arguments (bind_products.cpp).
#pragma once

#include <cstdint>

#include "kernels.h"
#include "rows.h"

namespace coldpress {

// A projection whose rows are in the units: the row's offset in a unit, a bias per unit or null, what the product goes
// through, and the rows' format.
struct Projection {
    int64_t offset;
    const float* bias;  // [count], in the order of the units
    Activation activation;
    Format format;
};

struct Mlp {
    Rows units;                     // `length` is that of the projections' rows, `format` that of the down column
    const Projection* projections;  // at most two
    int num_projections;
    const float* factors;  // [tokens, count], or null: the known factors of the inner activation
    int64_t down_offset, down_length;
    float threshold;  // of the projections' activations
    int activation_bits;
};

// out[t, down_length] = sum over units of (product of the projections of x[t, length] and of the factor) * the down
// column, for `tokens` vectors, each with the same bits as alone. Units are read once.
void mlp(const Mlp& mlp, const float* x, int tokens, float* out, int threads);

}  // namespace coldpress
