// Joins the planes of units, with the same bits as runtime/quantization/_planes.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "formats.h"
#include "rows.h"

namespace coldpress {

// A plain format in two planes: the bytes of a block in each of them, and how to join consecutive blocks. The plain block
// has as many bytes as both.
struct Planes {
    int64_t coarse_bytes, refinement_bytes;
    void (*join)(const uint8_t* coarse, const uint8_t* refinement, int64_t blocks, uint8_t* out);
};

// Throws std::invalid_argument if the format has no planes.
Planes planes_of(Format coarse);

// Rows of bytes: row i begins at base + index[i] * stride.
struct UnitRows {
    const uint8_t* base;
    int64_t stride;
    const int32_t* index;

    const uint8_t* at(int64_t i) const { return base + index[i] * stride; }
};

// Units in two planes: slices that follow each other, each of `blocks` blocks, and all of one plain format.
struct PlanarUnits {
    std::vector<Planes> slices;
    UnitRows coarse, refinement;
    int64_t count, blocks;

    // Bytes of a unit in the plain format.
    int64_t bytes() const { return blocks * static_cast<int64_t>(slices.size()) * block_bytes(); }
    int64_t block_bytes() const { return slices[0].coarse_bytes + slices[0].refinement_bytes; }
    // Writes the plain codes of units [first, last) one after the other.
    void join(int64_t first, int64_t last, uint8_t* out) const;
};

// out = the plain codes of all units
void join_units(const PlanarUnits& units, uint8_t* out, int threads);

// Calls step(rows, shift, first, last) until all rows of [first, last) have come: `rows` are rows of the plain format in
// memory, and row i of the caller's is rows.at(i - shift). Units in planes are joined a few at a time in memory of the
// calling thread, so that they are multiplied while they are in its cache; with `in_parts`, other units come in equally small steps.
template <typename Step>
void in_memory(const Rows& rows, int64_t first, int64_t last, bool in_parts, const Step& step) {
    if (!rows.units && !in_parts) return step(rows, int64_t{0}, first, last);
    constexpr int64_t kBytes = 64 << 10;
    const int64_t bytes = rows.units ? rows.units->bytes() : rows.stride;
    const int64_t most = std::max<int64_t>(4, kBytes / std::max<int64_t>(1, bytes) / 4 * 4);
    thread_local std::vector<uint8_t> joined;
    for (int64_t from = first; from < last; from += most) {
        const int64_t to = std::min(last, from + most);
        if (!rows.units) {
            step(rows, int64_t{0}, from, to);
            continue;
        }
        joined.resize(static_cast<size_t>((to - from) * bytes));
        rows.units->join(from, to, joined.data());
        step(Rows{joined.data() + rows.unit_offset, bytes, nullptr, to - from, rows.length, rows.format}, from, from, to);
    }
}

}  // namespace coldpress
