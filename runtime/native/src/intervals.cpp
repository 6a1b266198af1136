#include "intervals.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

namespace coldpress {
namespace {

constexpr uint8_t STARTED = 1;  // the best way to be reading unit i begins with it
constexpr uint8_t STOPPED = 2;  // before unit i, the best way not to be reading ended with unit i - 1

// Finds the intervals with the largest sum of gains less costs, exactly: dynamic programming over the units with two
// states, reading or not. `came` has units + 1 entries.
void choose(const float* gain, int64_t units, double unit_cost, double read_cost, uint8_t* came, uint8_t* chosen) {
    double reading = -std::numeric_limits<double>::infinity(), idle = 0;
    came[0] = 0;
    for (int64_t i = 0; i < units; ++i) {
        const double entered = idle - read_cost;
        const bool starts = entered >= reading;
        came[i] = static_cast<uint8_t>(came[i] | (starts ? STARTED : 0));
        reading = (starts ? entered : reading) + (static_cast<double>(gain[i]) - unit_cost);
        const bool stops = reading > idle;
        came[i + 1] = stops ? STOPPED : 0;
        idle = stops ? reading : idle;
    }
    bool on = came[units] & STOPPED;
    for (int64_t i = units - 1; i >= 0; --i) {
        chosen[i] = on;
        on = (on && !(came[i] & STARTED)) || (came[i] & STOPPED);
    }
}

struct Bounds {
    double gain, reads, bytes;
};

Bounds bounds_of(const float* gain, int64_t units, const uint8_t* chosen, ReadTimes times) {
    double sum = 0;
    int64_t reads = 0, count = 0;
    for (int64_t i = 0; i < units; ++i) {
        if (!chosen[i]) continue;
        sum += static_cast<double>(gain[i]);
        reads += i == 0 || !chosen[i - 1];
        ++count;
    }
    const double number = static_cast<double>(reads);
    return {sum, number * times.own, static_cast<double>(count) + number * times.edge};
}

}  // namespace

void best_intervals(const float* gain, int64_t tokens, int64_t units, double price, ReadTimes times, int steps,
                    uint8_t* chosen) {
    std::vector<uint8_t> came(static_cast<size_t>(units) + 1), tried(static_cast<size_t>(units));
    for (int64_t t = 0; t < tokens; ++t, gain += units, chosen += units) {
        double low = 0, high = 1, best = -std::numeric_limits<double>::infinity();
        for (int step = 0; step < steps; ++step) {
            const double mix = (low + high) / 2;
            const double read_cost = price * ((1 - mix) * times.edge + mix * times.own);
            choose(gain, units, price * (1 - mix), std::max(0.0, read_cost), came.data(), tried.data());
            const Bounds found = bounds_of(gain, units, tried.data(), times);
            const double worth = found.gain - price * std::max(found.reads, found.bytes);
            if (worth > best) {
                best = worth;
                std::copy(tried.begin(), tried.end(), chosen);
            }
            (found.reads > found.bytes ? low : high) = mix;
        }
    }
}

}  // namespace coldpress
