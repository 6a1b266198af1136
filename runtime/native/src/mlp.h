// The MLP of selected units: rows of the gate and the up projection, the activation, columns of the down projection. A
// unit is a neuron (mlp.cpp) or a block of neurons (mlp_blocks.cpp). The caller checks all arguments
// (bind_products.cpp).
#pragma once

#include <cstdint>
#include <optional>

#include "kernels.h"
#include "rows.h"

namespace coldpress {

// A projection whose rows are in the units: the offset of a unit's first row, a bias per neuron or null, what the
// product goes through, and the rows' format.
struct Projection {
    int64_t offset;
    const float* bias;  // [neurons], in the order of the units
    Activation activation;
    Format format;
};

struct Mlp {
    Rows units;                     // `length` is that of the projections' rows, `format` that of down
    const Projection* projections;  // at most two
    int num_projections;
    const float* factors;  // [tokens, count], or null: the known factors of the inner activation
    int64_t down_offset, down_length;  // down's slices: a neuron's column, or as many values of each row as neurons
    float threshold;  // of the projections' activations
    int activation_bits;
};

// Each token's x as rows of the projections take it; projections of one format share it.
class ProjectionInputs {
   public:
    ProjectionInputs(const Mlp& mlp, const float* x, int tokens);
    const Inputs& of(int projection) const { return own_[projection] ? *own_[projection] : *own_[0]; }

   private:
    std::optional<Inputs> own_[2];
};

// out[t, down_length] = sum over units of (product of the projections of x[t, length] and of the factor) * the down
// column, for `tokens` vectors, each with the same bits as alone. Units are read once.
void mlp(const Mlp& mlp, const float* x, int tokens, float* out, int threads);

// out[t, length] = the same of blocks of down_length neurons: a unit has their rows of gate, those of up, and their
// part of each of down's `length` rows, which multiplies the inner activations, rounded as x is.
void mlp_blocks(const Mlp& mlp, const float* x, int tokens, float* out, int threads);

}  // namespace coldpress
