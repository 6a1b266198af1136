// Searches the range of each group of values: the step and the start under which whole numbers lose least.
#pragma once

#include <cstdint>

namespace coldpress {

constexpr int64_t kMostGroup = 32;
constexpr int64_t kMostLevels = 32;

// What a group's numbers are: 0 to `highest`, value = step * number + start. With `zero` >= 0 the start is -zero * step,
// and steps may be negative; else it is free, but at most 0.
struct Numbers {
    int highest, zero;
};

// Fills steps[count] and starts[count] for groups of `size` <= kMostGroup values, at most kMostGroup. The price of a
// squared error of value i of group g is prices[(g % priced) * size + i].
void fit_ranges(const float* values, int64_t count, int64_t size, const float* prices, int64_t priced, Numbers numbers,
                float* steps, float* starts, int threads);

// Fills scales[count] for groups as above: value = scale * level, with `num_levels` <= kMostLevels ascending levels. The
// scale of a group whose prices are all 0 takes the value of largest magnitude to the level of largest magnitude;
// that of a group with a value that is not finite is not-a-number.
void fit_scales(const float* values, int64_t count, int64_t size, const float* prices, int64_t priced,
                const float* levels, int64_t num_levels, float* scales, int threads);

// Fills out[count, size] with the numbers from 0 to `highest` whose values, step * number + start, are nearest; 0 where
// a step is 0.
void nearest_numbers(const float* values, int64_t count, int64_t size, const float* steps, const float* starts,
                     int highest, uint8_t* out, int threads);

}  // namespace coldpress
