// The MLP of selected units in one pass: rows of the gate's and the up projection's, the activation, columns of the down
// projection. All arguments are checked by the caller (module.cpp).
#pragma once

#include <cstdint>

#include "kernels.h"
#include "rows.h"

namespace coldpress {

// A projection of which units hold a row: which bytes of a unit, a bias for each unit or null, whether it is activated.
struct Projection {
    int64_t offset;
    const float* bias;  // [count], in the order of the units
    bool activated;
};

struct Mlp {
    Rows units;                     // `length` is that of the projections' rows
    const Projection* projections;  // at most two
    int num_projections;
    const float* factors;  // [count], or null: what is known of the inner activation
    int64_t down_offset, down_length;
    Activation activation;
    float threshold;
    int activation_bits;
};

// out[down_length] = sum over units of (product of the projections of x and of the factor) * the down column
void mlp(const Mlp& mlp, const float* x, float* out, int threads);

}  // namespace coldpress
