#include "planes.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pool.h"
#include "rows.h"

namespace coldpress {
namespace {

constexpr int64_t kScaleBytes = 2, kTaskBytes = 64 << 10;

template <typename Word>
Word load(const uint8_t* p) {
    Word value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

void store(uint8_t* p, uint64_t value) { std::memcpy(p, &value, sizeof value); }

constexpr uint64_t each_byte(uint8_t byte) { return 0x0101010101010101 * byte; }

// The eight words of int4_2_2 hold, in byte j, bits 2 k and 2 k + 1 of value 8 k + j. Byte j of int4 has values j and
// j + 16, k = 0 and 2; byte j + 8 has values j + 8 and j + 24, k = 1 and 3.
void join_int4_2_2(const uint8_t* coarse, const uint8_t* refinement, uint8_t* out) {
    const uint64_t high = load<uint64_t>(coarse + kScaleBytes), low = load<uint64_t>(refinement);
    std::memcpy(out, coarse, kScaleBytes);
    store(out + kScaleBytes, (high & each_byte(0x33)) << 2 | (low & each_byte(0x33)));
    store(out + kScaleBytes + 8, (high & each_byte(0xCC)) | (low & each_byte(0xCC)) >> 2);
}

// One bit of each value: bit 2 k of byte j is that of value 8 k + j.
uint64_t spread(const uint8_t* p) {
    const uint64_t bits = load<uint32_t>(p);
    return bits | bits >> 1 << 32;
}

void join_int4_3_1(const uint8_t* coarse, const uint8_t* refinement, uint8_t* out) {
    const uint64_t two = load<uint64_t>(coarse + kScaleBytes), top = spread(coarse + kScaleBytes + 8);
    const uint64_t low = spread(refinement);
    std::memcpy(out, coarse, kScaleBytes);
    store(out + kScaleBytes,
          (top & each_byte(0x11)) << 3 | (two & each_byte(0x33)) << 1 | (low & each_byte(0x11)));
    store(out + kScaleBytes + 8,
          (top & each_byte(0x44)) << 1 | (two & each_byte(0xCC)) >> 1 | (low & each_byte(0x44)) >> 2);
}

void join_int8_4_4(const uint8_t* coarse, const uint8_t* refinement, uint8_t* out) {
    std::memcpy(out, coarse, kScaleBytes);
    for (int64_t at = 0; at < 16; at += 8) {
        const uint64_t high = load<uint64_t>(coarse + kScaleBytes + at), low = load<uint64_t>(refinement + at);
        const uint64_t first = (high & each_byte(0x0F)) << 4 | (low & each_byte(0x0F));
        const uint64_t second = (high & each_byte(0xF0)) | (low & each_byte(0xF0)) >> 4;
        store(out + kScaleBytes + at, first ^ each_byte(0x80));  // a number of 128 means 0
        store(out + kScaleBytes + 16 + at, second ^ each_byte(0x80));
    }
}

// A loop of its own for each format, so that a block costs no call.
template <Format F, int64_t kRefinementBytes, void (*kJoin)(const uint8_t*, const uint8_t*, uint8_t*)>
void join_blocks(const uint8_t* coarse, const uint8_t* refinement, int64_t blocks, uint8_t* out) {
    for (int64_t b = 0; b < blocks; ++b)
        kJoin(coarse + b * block_bytes(F), refinement + b * kRefinementBytes,
              out + b * (block_bytes(F) + kRefinementBytes));
}

template <Format F, int64_t kRefinementBytes, void (*kJoin)(const uint8_t*, const uint8_t*, uint8_t*)>
Planes planes() {
    return {block_bytes(F), kRefinementBytes, join_blocks<F, kRefinementBytes, kJoin>};
}

}  // namespace

Planes planes_of(Format coarse) {
    switch (coarse) {
        case Format::int4_2_2:
            return planes<Format::int4_2_2, 8, join_int4_2_2>();
        case Format::int4_3_1:
            return planes<Format::int4_3_1, 4, join_int4_3_1>();
        case Format::int8_4_4:
            return planes<Format::int8_4_4, 16, join_int8_4_4>();
        default:
            throw std::invalid_argument("the format has no planes; int4_2_2, int4_3_1 and int8_4_4 have");
    }
}

void PlanarUnits::join(int64_t first, int64_t last, uint8_t* out) const {
    for (int64_t i = first; i < last; ++i) {
        const uint8_t *high = coarse.at(i), *low = refinement.at(i);
        for (const Planes& planes : slices) {
            planes.join(high, low, blocks, out);
            high += blocks * planes.coarse_bytes;
            low += blocks * planes.refinement_bytes;
            out += blocks * block_bytes();
        }
    }
}

void join_units(const PlanarUnits& units, uint8_t* out, int threads) {
    const int64_t bytes = units.bytes(), step = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, bytes));
    const int useful = threads_worth(units.count * bytes, kThreadBytes, threads);
    compute_pool().run(parts_of(units.count, step), useful, [&](int64_t task) {
        units.join(task * step, std::min(units.count, (task + 1) * step), out + task * step * bytes);
    });
}

}  // namespace coldpress
