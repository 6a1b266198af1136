// Chooses which units to read together, under two bounds on time (runtime/kernels/intervals.py).
#pragma once

#include <cstdint>

namespace coldpress {

// The costs of reading; the time of one unit's bytes is 1.
struct ReadTimes {
    double own;      // time of one read operation, however short
    double edge;     // time of a read's bytes outside its units
    double overlap;  // 1: the larger bound counts, 0: their sum, between: a norm (schemas/law.py)
};

// chosen[t, i] = 1 if token t reads unit i. Tries `steps` mixes of the two bounds, by bisection towards the mix at
// which the bounds' norm is their mix, and takes the intervals with the largest gains less `price` times that norm; the
// first of ties.
void best_intervals(const float* gain, int64_t tokens, int64_t units, double price, ReadTimes times, int steps,
                    uint8_t* chosen);

}  // namespace coldpress
