#include "intervals.h"

#include <algorithm>
#include <cmath>
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
    return {sum, number * times.own, std::max(0.0, static_cast<double>(count) + number * times.edge)};
}

// The p-norm of two bounds with p = 1 / (1 - overlap); its ends are exact.
double together(double reads, double bytes, double overlap) {
    const double most = std::max(reads, bytes);
    if (overlap >= 1 || most <= 0) return most;
    if (overlap <= 0) return reads + bytes;
    const double power = 1 / (1 - overlap);
    return most * std::pow(std::pow(reads / most, power) + std::pow(bytes / most, power), 1 - overlap);
}

// A weight of the dual norm; exact where bounds overlap wholly or not at all.
double weight(double share, double overlap) {
    return overlap >= 1 ? share : overlap <= 0 ? 1.0 : std::pow(share, overlap);
}

}  // namespace

void best_intervals(const float* gain, int64_t tokens, int64_t units, double price, ReadTimes times, int steps,
                    uint8_t* chosen) {
    std::vector<uint8_t> came(static_cast<size_t>(units) + 1), tried(static_cast<size_t>(units));
    for (int64_t t = 0; t < tokens; ++t, gain += units, chosen += units) {
        double low = 0, high = 1, best = -std::numeric_limits<double>::infinity();
        for (int step = 0; step < steps; ++step) {
            const double mix = (low + high) / 2;
            const double of_bytes = weight(1 - mix, times.overlap), of_reads = weight(mix, times.overlap);
            const double read_cost = price * (of_bytes * times.edge + of_reads * times.own);
            choose(gain, units, price * of_bytes, std::max(0.0, read_cost), came.data(), tried.data());
            const Bounds found = bounds_of(gain, units, tried.data(), times);
            const double worth = found.gain - price * together(found.reads, found.bytes, times.overlap);
            if (worth > best) {
                best = worth;
                std::copy(tried.begin(), tried.end(), chosen);
            }
            const double balance = times.overlap >= 1 ? 1.0 : std::pow(mix / (1 - mix), 1 - times.overlap);
            (found.reads > found.bytes * balance ? low : high) = mix;
        }
    }
}

}  // namespace coldpress
