#include "mlp.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <vector>

#include "cpu.h"
#include "pool.h"

namespace coldpress {
namespace {

// Units are divided into parts, each with a separate sum. The number of parts depends only on the units, so that the
// number of threads changes no bit.
constexpr int64_t kPartBytes = 128 << 10, kMostParts = 16;
// Bytes of units that several tokens use one after the other, while they are in the processor's cache.
constexpr int64_t kSharedBytes = 64 << 10;

// The units of a part that are not finished: if the inner activation is exactly zero, the rest of the unit is skipped
// (PowerInfer 5.4). `index` is a unit's place among all units.
struct Active {
    std::vector<int64_t> index;
    std::vector<float> inner;

    void drop_zeros() {
        size_t kept = 0;
        for (size_t i = 0; i < index.size(); ++i) {
            if (inner[i] == 0.0f) continue;
            index[kept] = index[i];
            inner[kept++] = inner[i];
        }
        index.resize(kept);
        inner.resize(kept);
    }

    // Their slices at `offset`, followed by the slices to read next: those at `next_offset` from unit `next` on.
    std::vector<const uint8_t*> rows(const Rows& units, int64_t offset, int64_t next, int64_t next_offset) const {
        std::vector<const uint8_t*> at;
        at.reserve(index.size() + kRowsAhead);
        for (const int64_t i : index) at.push_back(units.at(i) + offset);
        for (int64_t i = next; i < next + kRowsAhead; ++i)
            at.push_back(units.at(std::min(i, units.count - 1)) + next_offset);
        return at;
    }
};

// Multiplies the inner activations by those of a projection, whose products with the active units are `values`.
void finish(const Mlp& mlp, const Projection& projection, std::vector<float>& values, Active& active) {
    const int64_t count = static_cast<int64_t>(values.size());
    if (projection.bias)
        for (size_t i = 0; i < values.size(); ++i) values[i] += projection.bias[active.index[i]];
    kernels().activate(projection.activation, mlp.threshold, values.data(), count);
    for (size_t i = 0; i < values.size(); ++i) active.inner[i] *= values[i];
    active.drop_zeros();
}

void project(const Mlp& mlp, const Projection& projection, const Rows& units, int64_t next_offset, const Inputs& x,
             int t, Active& active) {
    if (active.index.empty()) return;
    const auto at = active.rows(units, projection.offset, active.index.front(), next_offset);
    std::vector<float> values(active.index.size());
    x.dot_one(t, at.data(), static_cast<int64_t>(values.size()), values.data());
    finish(mlp, projection, values, active);
}

bool same_units(const std::vector<Active>& active) {
    return std::all_of(active.begin(), active.end(),
                       [&](const Active& one) { return one.index == active[0].index; });
}

// Projects several tokens, each with the bits that it has alone: together where all use the same units.
void project_each(const Mlp& mlp, const Projection& projection, const Rows& units, int64_t next_offset,
                  const Inputs& inputs, std::vector<Active>& active) {
    if (active[0].index.empty() || !same_units(active)) {
        for (size_t t = 0; t < active.size(); ++t)
            project(mlp, projection, units, next_offset, inputs, static_cast<int>(t), active[t]);
        return;
    }
    const auto at = active[0].rows(units, projection.offset, active[0].index.front(), next_offset);
    std::vector<std::vector<float>> values(active.size(), std::vector<float>(active[0].index.size()));
    std::vector<float*> out;
    for (std::vector<float>& own : values) out.push_back(own.data());
    inputs.dot(at.data(), static_cast<int64_t>(values[0].size()), out.data());
    for (size_t t = 0; t < active.size(); ++t) finish(mlp, projection, values[t], active[t]);
}

Active all_of(int64_t first, int64_t last, const float* factors) {
    Active active{std::vector<int64_t>(static_cast<size_t>(last - first)),
                  std::vector<float>(static_cast<size_t>(last - first), 1.0f)};
    std::iota(active.index.begin(), active.index.end(), first);
    if (factors) std::copy(factors + first, factors + last, active.inner.begin());
    active.drop_zeros();
    return active;
}

// Adds the units [first, last) to each token's sums; units from `next` on follow, so they are prefetched.
void add_part(const Mlp& mlp, const Rows& units, const ProjectionInputs& inputs, int64_t first, int64_t last,
              int64_t next, const std::vector<float*>& sums) {
    std::vector<Active> active;
    for (size_t t = 0; t < sums.size(); ++t) {
        const int64_t skipped = static_cast<int64_t>(t) * mlp.units.count;
        active.push_back(all_of(first, last, mlp.factors ? mlp.factors + skipped : nullptr));
    }
    const auto offset = [&mlp](int p) {
        return p < mlp.num_projections ? mlp.projections[p].offset : mlp.down_offset;
    };
    for (int p = 0; p < mlp.num_projections; ++p)
        project_each(mlp, mlp.projections[p], units, offset(p + 1), inputs.of(p), active);
    if (same_units(active)) {
        const auto at = active[0].rows(units, mlp.down_offset, next, offset(0));
        std::vector<const float*> inner;
        for (const Active& one : active) inner.push_back(one.inner.data());
        kernels().axpy(mlp.units.format, at.data(), static_cast<int64_t>(active[0].index.size()), mlp.down_length,
                       static_cast<int>(active.size()), inner.data(), sums.data());
        return;
    }
    for (size_t t = 0; t < active.size(); ++t) {
        const auto at = active[t].rows(units, mlp.down_offset, next, offset(0));
        const float* const inner = active[t].inner.data();
        kernels().axpy(mlp.units.format, at.data(), static_cast<int64_t>(active[t].index.size()), mlp.down_length, 1,
                       &inner, &sums[t]);
    }
}

}  // namespace

ProjectionInputs::ProjectionInputs(const Mlp& mlp, const float* x, int tokens) {
    for (int p = 0; p < mlp.num_projections; ++p) {
        const Format format = mlp.projections[p].format;
        if (p == 0 || format != mlp.projections[0].format)
            own_[p].emplace(format, x, tokens, mlp.units.length, mlp.activation_bits);
    }
}

void mlp(const Mlp& mlp, const float* x, int tokens, float* out, int threads) {
    const Rows& units = mlp.units;
    const int64_t slices = mlp.num_projections + 1;
    const int64_t bytes = units.count * slices * row_bytes(units.format, mlp.down_length);
    const int64_t most = std::clamp<int64_t>(bytes / kPartBytes, 1, kMostParts);
    const int64_t step = (units.count + most - 1) / most, parts = parts_of(units.count, step);
    const int64_t shared = std::max<int64_t>(4, kSharedBytes / std::max<int64_t>(1, units.stride) / 4 * 4);
    const int64_t most_together = tokens > 1 ? shared : step;
    const ProjectionInputs inputs(mlp, x, tokens);
    std::deque<PartSums> sums;
    for (int t = 0; t < tokens; ++t) sums.emplace_back(parts, mlp.down_length);
    const int useful = threads_worth(bytes * tokens, kThreadBytes, threads);
    compute_pool().run_in_sight(parts, useful, [&](int64_t part, int64_t next) {
        const int64_t first = part * step, last = std::min(units.count, first + step);
        std::vector<float*> y;
        for (PartSums& one : sums) y.push_back(one.take());
        for (int64_t from = first; from < last; from += most_together)
            add_part(mlp, units, inputs, from, std::min(last, from + most_together), next * step, y);
        for (int t = 0; t < tokens; ++t) sums[t].give(part, y[t]);
    });
    for (int t = 0; t < tokens; ++t) sums[t].total(out + t * mlp.down_length);
}

}  // namespace coldpress
