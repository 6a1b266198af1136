#include "ranges.h"

#include <algorithm>
#include <cmath>

#include "pool.h"

namespace coldpress {
namespace {

constexpr int kLanes = 8;  // sums run in lanes of their own, so that they are vectors and the same on every machine
constexpr int64_t kTaskGroups = 4096;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to the nearest whole number
// Ranges that are tried, as shares of the one from the least to the largest value.
constexpr float kShares[] = {1.08f, 1.04f, 1.0f, 0.97f, 0.94f, 0.91f, 0.88f, 0.85f, 0.82f, 0.78f, 0.74f, 0.7f, 0.65f, 0.6f, 0.5f, 0.4f};

struct Group {
    float values[kMostGroup], prices[kMostGroup];  // padded with values of price 0
    double price, value, square;                   // sums of prices, and of prices times values and squares
    float least, most;
};

struct Sums {
    double number, square, product;  // sums of prices times numbers, their squares, and their products with values
};

struct Range {
    double step, start, lost;
};

double total(const float* lanes) {
    return ((double(lanes[0]) + lanes[1]) + (double(lanes[2]) + lanes[3])) +
           ((double(lanes[4]) + lanes[5]) + (double(lanes[6]) + lanes[7]));
}

Group group_of(const float* values, const float* prices, int64_t size) {
    Group g{};
    std::copy_n(values, size, g.values);
    std::copy_n(prices, size, g.prices);
    float price[kLanes] = {}, value[kLanes] = {}, square[kLanes] = {};
    for (int64_t i = 0; i < kMostGroup; i += kLanes)
        for (int j = 0; j < kLanes; ++j) {
            const float weighted = g.prices[i + j] * g.values[i + j];
            price[j] += g.prices[i + j];
            value[j] += weighted;
            square[j] += weighted * g.values[i + j];
        }
    g.price = total(price), g.value = total(value), g.square = total(square);
    const auto [least, most] = std::minmax_element(values, values + size);
    g.least = *least, g.most = *most;
    return g;
}

// Numbers are nearest to (value - anchor) * inverse, between `low` and `high`.
Sums sums_of(const Group& g, float anchor, float inverse, float low, float high) {
    float number[kLanes] = {}, square[kLanes] = {}, product[kLanes] = {};
    for (int64_t i = 0; i < kMostGroup; i += kLanes)
        for (int j = 0; j < kLanes; ++j) {
            const float scaled = (g.values[i + j] - anchor) * inverse;
            const float bounded = scaled < low ? low : (scaled > high ? high : scaled);
            const float whole = (bounded + kRound) - kRound, weighted = g.prices[i + j] * whole;
            number[j] += weighted;
            square[j] += weighted * whole;
            product[j] += weighted * g.values[i + j];
        }
    return {total(number), total(square), total(product)};
}

double lost_of(const Group& g, const Sums& s, double step, double start) {
    return g.square + step * (step * s.square + 2 * start * s.number - 2 * s.product) +
           start * (start * g.price - 2 * g.value);
}

// The least squares for given numbers counted from the range's start, with a start of at most 0.
Range fitted(const Group& g, const Sums& s) {
    const double determinant = g.price * s.square - s.number * s.number;
    double step = 0, start = 0;
    if (determinant > 0) {
        step = (g.price * s.product - s.number * g.value) / determinant;
        start = (s.square * g.value - s.number * s.product) / determinant;
    }
    if (!(determinant > 0) || start > 0 || step <= 0) {
        start = 0;
        step = s.square > 0 ? s.product / s.square : 0;
    }
    return {step, start, lost_of(g, s, step, start)};
}

Range best_free(const Group& g, int highest) {
    const float low = std::min(g.least, 0.0f), width = g.most - low, top = static_cast<float>(highest);
    if (!(width > 0)) return {0, low, 0};
    Range best{width / top, low, INFINITY};
    for (const float share : kShares)
        for (const bool from_top : {false, true}) {
            const float inverse = top / (width * share);
            const float anchor = from_top ? g.most - width * share : low;
            const Range found = fitted(g, sums_of(g, anchor, inverse, 0, top));
            if (found.step > 0 && found.lost < best.lost) best = found;
        }
    return best;
}

Range best_centred(const Group& g, Numbers numbers) {
    const float peak = std::max(std::fabs(g.least), std::fabs(g.most));
    if (!(peak > 0)) return {0, 0, 0};
    const float low = static_cast<float>(-numbers.zero), high = static_cast<float>(numbers.highest - numbers.zero);
    Range best{0, 0, INFINITY};
    for (const float share : kShares)
        for (const float sign : {1.0f, -1.0f}) {
            const Sums s = sums_of(g, 0, sign * std::max(-low, high) / (peak * share), low, high);
            if (!(s.square > 0)) continue;
            const double step = s.product / s.square, lost = g.square - step * s.product;
            if (lost < best.lost) best = {step, -step * numbers.zero, lost};
        }
    return best;
}

}  // namespace

void fit_ranges(const float* values, int64_t count, int64_t size, const float* prices, int64_t priced, Numbers numbers,
                float* steps, float* starts, int threads) {
    compute_pool().run((count + kTaskGroups - 1) / kTaskGroups, threads, [&](int64_t task) {
        for (int64_t at = task * kTaskGroups; at < std::min(count, (task + 1) * kTaskGroups); ++at) {
            const Group g = group_of(values + at * size, prices + at % priced * size, size);
            const Range found = numbers.zero < 0 ? best_free(g, numbers.highest) : best_centred(g, numbers);
            steps[at] = static_cast<float>(found.step);
            starts[at] = static_cast<float>(found.start);
        }
    });
}

}  // namespace coldpress
