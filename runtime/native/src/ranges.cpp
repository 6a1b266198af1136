#include "ranges.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "pool.h"

namespace coldpress {
namespace {

constexpr int kLanes = 8;  // sums run in lanes of their own, so that they are vectors and the same on every machine
constexpr int64_t kTaskGroups = 4096;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to the nearest whole number
// Ranges that are tried, as shares of the one from the least to the largest value. The finer the numbers, the less does
// cutting off the largest values gain.
constexpr float kShares[] = {1.0f, 1.04f, 0.97f, 0.94f, 0.91f, 0.87f, 0.83f, 0.78f, 0.72f, 0.65f, 0.55f, 0.42f};
constexpr int shares_for(int highest) { return highest <= 15 ? 12 : (highest <= 31 ? 7 : 3); }

// The same code for vectors of eight floats, if the machine has them. No products are fused into sums, so the bits agree.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define COLDPRESS_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define COLDPRESS_WIDE
#endif

struct Group {
    float values[kMostGroup], prices[kMostGroup];  // padded with values of price 0
    double price, value, square;                   // sums of prices, and of prices times values and squares
    float least, most;
    int64_t lanes;  // values, rounded up to whole vectors
};

struct Sums {
    double number, square, product;  // sums of prices times numbers, their squares, and their products with values
};

struct Range {
    double step, start, lost;
};

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));  // GCC's and Clang's, on any machine

[[gnu::always_inline]] inline Lanes load(const float* from) {
    Lanes out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

typedef double Halves __attribute__((vector_size(kLanes / 2 * sizeof(double))));

[[gnu::always_inline]] inline double total(const Lanes& lanes) {
    const Halves pairs = Halves{lanes[0], lanes[2], lanes[4], lanes[6]} + Halves{lanes[1], lanes[3], lanes[5], lanes[7]};
    return (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
}

Group group_of(const float* values, const float* prices, int64_t size) {
    Group g{};
    std::copy_n(values, size, g.values);
    std::copy_n(prices, size, g.prices);
    Lanes price{}, value{}, square{};
    for (int64_t i = 0; i < kMostGroup; i += kLanes) {
        const Lanes of_lane = load(g.prices + i), weighted = of_lane * load(g.values + i);
        price += of_lane;
        value += weighted;
        square += weighted * load(g.values + i);
    }
    g.price = total(price), g.value = total(value), g.square = total(square);
    const auto [least, most] = std::minmax_element(values, values + size);
    g.least = *least, g.most = *most;
    g.lanes = (size + kLanes - 1) / kLanes * kLanes;
    return g;
}

// The nearest whole number from `low` to `high`.
struct Whole {
    float low, high;

    [[gnu::always_inline]] inline Lanes operator()(const Lanes& value) const {
        const Lanes lows = Lanes{} + low, highs = Lanes{} + high;
        Lanes found = value < lows ? lows : value;
        found = found > highs ? highs : found;
        return (found + kRound) - kRound;
    }
};

// The nearest of some levels, which are whole numbers, so that sums of their differences are exact.
struct Table {
    float lowest = 0, middles[kMostLevels], rises[kMostLevels];
    int64_t num_rises;

    Table(const float* levels, int64_t num_levels) : lowest(levels[0]), num_rises(num_levels - 1) {
        for (int64_t i = 0; i < num_rises; ++i) {
            middles[i] = (levels[i] + levels[i + 1]) / 2;
            rises[i] = levels[i + 1] - levels[i];
        }
    }

    [[gnu::always_inline]] inline Lanes operator()(const Lanes& value) const {
        Lanes found = Lanes{} + lowest;
        for (int64_t i = 0; i < num_rises; ++i) {
            const Lanes middle = Lanes{} + middles[i];
            found += value > middle ? Lanes{} + rises[i] : Lanes{};
        }
        return found;
    }
};

// Numbers are what `nearest` makes of (value - anchor) * inverse.
template <typename Nearest>
[[gnu::always_inline]] inline Sums sums_of(const Group& g, float anchor, float inverse, const Nearest& nearest) {
    Lanes number{}, square{}, product{};
    for (int64_t i = 0; i < g.lanes; i += kLanes) {
        const Lanes values = load(g.values + i), found = nearest((values - anchor) * inverse);
        const Lanes weighted = load(g.prices + i) * found;
        number += weighted;
        square += weighted * found;
        product += weighted * values;
    }
    return {total(number), total(square), total(product)};
}

[[gnu::always_inline]] inline double lost_of(const Group& g, const Sums& s, double step, double start) {
    return g.square + step * (step * s.square + 2 * start * s.number - 2 * s.product) +
           start * (start * g.price - 2 * g.value);
}

// The least squares for given numbers counted from the range's start, with a start of at most 0.
[[gnu::always_inline]] inline Range fitted(const Group& g, const Sums& s) {
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

COLDPRESS_WIDE Range best_free(const Group& g, int highest) {
    const float low = std::min(g.least, 0.0f), width = g.most - low, top = static_cast<float>(highest);
    if (!(width > 0)) return {0, low, 0};
    Range best{width / top, low, INFINITY};
    for (int at = 0; at < shares_for(highest); ++at)
        for (const bool from_top : {false, true}) {
            const float tried = width * kShares[at], anchor = from_top ? g.most - tried : low;
            const Range found = fitted(g, sums_of(g, anchor, top / tried, Whole{0, top}));
            if (found.step > 0 && found.lost < best.lost) best = found;
        }
    return best;
}

// Finds the best step of a group without a start. Numbers go from `low` to `high`; `highest` is their count less one.
template <typename Nearest>
[[gnu::always_inline]] inline double best_step(const Group& g, float low, float high, int highest,
                                               const Nearest& nearest) {
    const float peak = -g.least > g.most ? g.least : g.most, extreme = -low >= high ? low : high;
    if (peak == 0) return 0;
    double best = peak / extreme, least = INFINITY;
    const float size = std::fabs(peak), reach = std::fabs(extreme);
    for (int at = 0; at < shares_for(highest); ++at)
        for (const float sign : {1.0f, -1.0f}) {
            const Sums s = sums_of(g, 0, sign * reach / (size * kShares[at]), nearest);
            if (!(s.square > 0)) continue;
            const double step = s.product / s.square, lost = g.square - step * s.product;
            if (lost < least) best = step, least = lost;
        }
    return best;
}

COLDPRESS_WIDE double best_whole(const Group& g, float low, float high) {
    return best_step(g, low, high, static_cast<int>(high - low), Whole{low, high});
}

COLDPRESS_WIDE double best_of_table(const Group& g, float low, float high, const Table& levels) {
    return best_step(g, low, high, static_cast<int>(levels.num_rises), levels);
}

Range best_centred(const Group& g, Numbers numbers) {
    const float zero = static_cast<float>(numbers.zero);
    const double step = best_whole(g, -zero, static_cast<float>(numbers.highest) - zero);
    return {step, -step * numbers.zero, 0};
}

bool are_consecutive(const float* levels, int64_t num_levels) {
    for (int64_t i = 1; i < num_levels; ++i)
        if (levels[i] != levels[i - 1] + 1) return false;
    return true;
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

void fit_scales(const float* values, int64_t count, int64_t size, const float* prices, int64_t priced,
                const float* levels, int64_t num_levels, float* scales, int threads) {
    const Table table(levels, num_levels);
    const bool is_whole = are_consecutive(levels, num_levels);
    const float low = levels[0], high = levels[num_levels - 1];
    compute_pool().run((count + kTaskGroups - 1) / kTaskGroups, threads, [&](int64_t task) {
        for (int64_t at = task * kTaskGroups; at < std::min(count, (task + 1) * kTaskGroups); ++at) {
            const Group g = group_of(values + at * size, prices + at % priced * size, size);
            const double found = is_whole ? best_whole(g, low, high) : best_of_table(g, low, high, table);
            scales[at] = std::isfinite(g.square) ? static_cast<float>(found) : NAN;
        }
    });
}

void nearest_numbers(const float* values, int64_t count, int64_t size, const float* steps, const float* starts,
                     int highest, uint8_t* out, int threads) {
    const float top = static_cast<float>(highest);
    compute_pool().run((count + kTaskGroups - 1) / kTaskGroups, threads, [&](int64_t task) {
        for (int64_t at = task * kTaskGroups; at < std::min(count, (task + 1) * kTaskGroups); ++at) {
            const float quotient = 1.0f / steps[at], inverse = std::isfinite(quotient) ? quotient : 0.0f;
            for (int64_t i = at * size; i < (at + 1) * size; ++i) {
                const float scaled = (values[i] - starts[at]) * inverse;
                out[i] = static_cast<uint8_t>((std::min(std::max(scaled, 0.0f), top) + kRound) - kRound);
            }
        }
    });
}

}  // namespace coldpress
