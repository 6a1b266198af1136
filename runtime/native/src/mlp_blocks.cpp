#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <vector>

#include "cpu.h"
#include "mlp.h"
#include "pool.h"

namespace coldpress {
namespace {

constexpr int64_t kTaskBytes = 64 << 10;  // rows of gate and up that several tokens use while they are in the cache
constexpr int64_t kTaskRows = 48;         // rows of down in a task, of all units

// Adjacent rows of a unit.
struct Span {
    const uint8_t* first;
    int64_t bytes, count;  // of a row; of rows
};

// Points to rows, and then to kRowsAhead of those to be read next, as kernels expect them.
void point(const Span& rows, const Span& next, std::vector<const uint8_t*>& at) {
    at.resize(static_cast<size_t>(rows.count + kRowsAhead));
    const uint8_t** const to = at.data();
    for (int64_t i = 0; i < rows.count; ++i) to[i] = rows.first + i * rows.bytes;
    for (int64_t i = 0; i < kRowsAhead; ++i) to[rows.count + i] = next.first + std::min(i, next.count - 1) * next.bytes;
}

// Copies rows to places `stride` apart. They have at least 16 bytes: a call would take longer than copying so few.
void copy_each(const Span& rows, uint8_t* to, int64_t stride) {
    const int64_t last = rows.bytes - 16;
    for (int64_t i = 0; i < rows.count; ++i, to += stride) {
        const uint8_t* const from = rows.first + i * rows.bytes;
        std::memcpy(to, from, 16);
        for (int64_t at = 16; at < last; at += 16) std::memcpy(to + at, from + at, 16);
        std::memcpy(to + last, from + last, 16);
    }
}

// Kernels take kPiece values of a row at a time, so units of fewer neurons are joined: their parts of a row are copied
// one behind another.
class Blocks {
   public:
    Blocks(const Mlp& mlp, const float* x, int tokens)
        : mlp_(mlp), tokens_(tokens), block_(mlp.down_length), joined_(std::max<int64_t>(1, kPiece / block_)),
          inputs_(mlp, x, tokens), inner_(static_cast<size_t>(mlp.units.count * tokens * block_)),
          rounded_(static_cast<size_t>(parts_of(mlp.units.count, joined_))), finished_(rounded_.size()) {}

    // The inner activations of all units; the thread that finishes the last part of joined units rounds theirs.
    void project(int threads) {
        int64_t bytes = 0;  // of a neuron
        for (int p = 0; p < mlp_.num_projections; ++p) bytes += projection_bytes(p);
        const int64_t step = std::max<int64_t>(4, kTaskBytes / std::max<int64_t>(1, bytes) / 4 * 4);
        const int64_t per_unit = parts_of(block_, step), tasks = mlp_.units.count * per_unit;
        const auto part = [&](int64_t task) {
            const int64_t first = task % per_unit * step;
            return Part{task / per_unit, first, std::min(step, block_ - first)};
        };
        const int useful = threads_worth(mlp_.units.count * block_ * bytes * tokens_, kThreadBytes, threads);
        compute_pool().run_in_sight(tasks, useful, [&](int64_t task, int64_t next) {
            const Part own = part(task);
            project_part(own, part(next < tasks ? next : task));
            const auto group = static_cast<size_t>(own.unit / joined_);
            const int64_t width = width_of(own.unit);
            if (++finished_[group] == width / block_ * per_unit)
                rounded_[group].emplace(mlp_.units.format, inner_of(own.unit / joined_ * joined_, 0), tokens_, width,
                                        mlp_.activation_bits);
        });
    }

    // out[t, length] = sum over units of the products of down's rows with the inner activations
    void reduce(float* out, int threads) {
        const int64_t length = mlp_.units.length, tasks = parts_of(length, kTaskRows);
        const int64_t bytes = mlp_.units.count * length * row_bytes(mlp_.units.format, block_);
        const int useful = threads_worth(bytes * tokens_, kThreadBytes, threads);
        std::fill_n(out, tokens_ * length, 0.0f);
        compute_pool().run_in_sight(tasks, useful, [&](int64_t task, int64_t next) {
            reduce_part(task * kTaskRows, (next < tasks ? next : task) * kTaskRows, out);
        });
    }

   private:
    // Neurons of a unit.
    struct Part {
        int64_t unit, first, count;
    };

    // The neurons of the units that are joined with this one.
    int64_t width_of(int64_t unit) const {
        return std::min(joined_, mlp_.units.count - unit / joined_ * joined_) * block_;
    }
    float* inner_of(int64_t unit, int64_t t) {
        const int64_t place = unit % joined_;
        return inner_.data() + (unit - place) * tokens_ * block_ + t * width_of(unit) + place * block_;
    }
    int64_t projection_bytes(int p) const { return row_bytes(mlp_.projections[p].format, mlp_.units.length); }
    Span projection_rows(int p, const Part& part) const {
        const int64_t bytes = projection_bytes(p);
        return {mlp_.units.at(part.unit) + mlp_.projections[p].offset + part.first * bytes, bytes, part.count};
    }
    Span down_rows(int64_t unit, int64_t first) const {
        const int64_t bytes = row_bytes(mlp_.units.format, block_);
        return {mlp_.units.at(unit) + mlp_.down_offset + first * bytes, bytes,
                std::min(kTaskRows, mlp_.units.length - first)};
    }

    // The rows of down from `first` on over the units that are joined from `unit` on.
    Span join(int64_t unit, int64_t first, std::vector<uint8_t>& memory) const {
        const int64_t last = std::min(unit + joined_, mlp_.units.count), each = row_bytes(mlp_.units.format, block_);
        const Span joined{nullptr, (last - unit) * each, down_rows(unit, first).count};
        memory.resize(static_cast<size_t>(joined.bytes * joined.count));
        for (int64_t u = unit; u < last; ++u)
            copy_each(down_rows(u, first), memory.data() + (u - unit) * each, joined.bytes);
        return {memory.data(), joined.bytes, joined.count};
    }

    // The inner activations of some neurons, for each token.
    void project_part(const Part& part, const Part& next) {
        for (int t = 0; t < tokens_; ++t)
            std::fill_n(inner_of(part.unit, t) + part.first, part.count,
                        mlp_.factors ? mlp_.factors[t * mlp_.units.count + part.unit] : 1.0f);
        std::vector<float> values(static_cast<size_t>(tokens_ * part.count));
        std::vector<float*> out;
        std::vector<const uint8_t*> at;
        for (int t = 0; t < tokens_; ++t) out.push_back(values.data() + t * part.count);
        for (int p = 0; p < mlp_.num_projections; ++p) {
            const Projection& own = mlp_.projections[p];
            const Span ahead = p + 1 < mlp_.num_projections ? projection_rows(p + 1, part) : projection_rows(0, next);
            point(projection_rows(p, part), ahead, at);
            inputs_.of(p).dot(at.data(), part.count, out.data());
            const float* const bias = own.bias ? own.bias + part.unit * block_ + part.first : nullptr;
            for (int t = 0; t < tokens_; ++t) {
                float* const inner = inner_of(part.unit, t) + part.first;
                for (int64_t i = 0; bias && i < part.count; ++i) out[t][i] += bias[i];
                kernels().activate(own.activation, mlp_.threshold, out[t], part.count);
                for (int64_t i = 0; i < part.count; ++i) inner[i] *= out[t][i];
            }
        }
    }

    // Some values of each token's result; those from `next` on follow, so that their rows are prefetched.
    void reduce_part(int64_t first, int64_t next, float* out) const {
        const int64_t units = mlp_.units.count, length = mlp_.units.length;
        std::vector<float> values(static_cast<size_t>(tokens_ * kTaskRows));
        std::vector<float*> products;
        std::vector<const uint8_t*> at;
        std::vector<uint8_t> memory;
        for (int t = 0; t < tokens_; ++t) products.push_back(values.data() + t * kTaskRows);
        for (int64_t u = 0; u < units; u += joined_) {
            const Span rows = joined_ > 1 ? join(u, first, memory) : down_rows(u, first);
            const int64_t after = u + joined_;
            point(rows, joined_ > 1 ? rows : after < units ? down_rows(after, first) : down_rows(0, next), at);
            rounded_[static_cast<size_t>(u / joined_)]->dot(at.data(), rows.count, products.data());
            for (int t = 0; t < tokens_; ++t) {
                float* const to = out + t * length + first;
                for (int64_t i = 0; i < rows.count; ++i) to[i] += products[t][i];
            }
        }
    }

    const Mlp& mlp_;
    const int tokens_;
    const int64_t block_, joined_;  // neurons of a unit; units
    const ProjectionInputs inputs_;
    std::vector<float> inner_;  // [units / joined, tokens, joined, block]
    std::vector<std::optional<Inputs>> rounded_;  // of joined units, for all tokens
    std::vector<std::atomic<int64_t>> finished_;  // parts of joined units
};

}  // namespace

void mlp_blocks(const Mlp& mlp, const float* x, int tokens, float* out, int threads) {
    Blocks blocks(mlp, x, tokens);
    blocks.project(threads);
    blocks.reduce(out, threads);
}

}  // namespace coldpress
