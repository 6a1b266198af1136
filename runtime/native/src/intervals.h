// Which units to read together, under the larger of two bounds on time (runtime/kernels/intervals.py).
#pragma once

#include <cstdint>

namespace coldpress {

// What reading costs, in the time that one unit's bytes take.
struct ReadTimes {
    double own;   // of a read, however short
    double edge;  // of the bytes of a read that belong to no unit
};

// chosen[t, i] = 1 where token t reads unit i: of `steps` mixes of the two bounds that close in on where they are equal,
// the intervals whose gains, less `price` times the larger bound, are the most; the first of equal ones.
void best_intervals(const float* gain, int64_t tokens, int64_t units, double price, ReadTimes times, int steps,
                    uint8_t* chosen);

}  // namespace coldpress
