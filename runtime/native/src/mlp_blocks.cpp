#include <algorithm>
#include <deque>
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

// Pointers to rows, followed by kRowsAhead of those to be read next, as kernels expect them.
std::vector<const uint8_t*> pointers(const Span& rows, const Span& next) {
    std::vector<const uint8_t*> found;
    found.reserve(static_cast<size_t>(rows.count + kRowsAhead));
    for (int64_t i = 0; i < rows.count; ++i) found.push_back(rows.first + i * rows.bytes);
    for (int64_t i = 0; i < kRowsAhead; ++i) found.push_back(next.first + std::min(i, next.count - 1) * next.bytes);
    return found;
}

class Blocks {
   public:
    Blocks(const Mlp& mlp, const float* x, int tokens)
        : mlp_(mlp), tokens_(tokens), block_(mlp.down_length), inputs_(mlp, x, tokens),
          inner_(static_cast<size_t>(mlp.units.count * tokens * block_)) {}

    void project(int threads) {
        int64_t bytes = 0;  // of a neuron
        for (int p = 0; p < mlp_.num_projections; ++p) bytes += projection_bytes(p);
        const int64_t step = std::max<int64_t>(4, kTaskBytes / std::max<int64_t>(1, bytes) / 4 * 4);
        const int64_t per_unit = parts_of(block_, step), tasks = mlp_.units.count * per_unit;
        const int useful = threads_worth(mlp_.units.count * block_ * bytes * tokens_, kThreadBytes, threads);
        compute_pool().run_in_sight(tasks, useful, [&](int64_t task, int64_t next) {
            const auto part = [&](int64_t number) {
                const int64_t first = number % per_unit * step;
                return Part{number / per_unit, first, std::min(step, block_ - first)};
            };
            project_part(part(task), part(next < tasks ? next : task));
        });
    }

    // out[t, length] = sum over units of the products of down's rows with the inner activations
    void reduce(float* out, int threads) {
        const int64_t length = mlp_.units.length, tasks = parts_of(length, kTaskRows);
        std::deque<Inputs> inner;
        for (int64_t u = 0; u < mlp_.units.count; ++u)
            inner.emplace_back(mlp_.units.format, inner_of(u, 0), tokens_, block_, mlp_.activation_bits);
        std::fill_n(out, tokens_ * length, 0.0f);
        const int64_t bytes = mlp_.units.count * length * row_bytes(mlp_.units.format, block_);
        compute_pool().run_in_sight(tasks, threads_worth(bytes * tokens_, kThreadBytes, threads), [&](int64_t task, int64_t next) {
            reduce_part(inner, task * kTaskRows, (next < tasks ? next : task) * kTaskRows, out);
        });
    }

   private:
    // Neurons of a unit.
    struct Part {
        int64_t unit, first, count;
    };

    float* inner_of(int64_t unit, int64_t t) { return inner_.data() + (unit * tokens_ + t) * block_; }
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

    // The inner activations of some neurons, for each token.
    void project_part(const Part& part, const Part& next) {
        for (int t = 0; t < tokens_; ++t)
            std::fill_n(inner_of(part.unit, t) + part.first, part.count,
                        mlp_.factors ? mlp_.factors[t * mlp_.units.count + part.unit] : 1.0f);
        std::vector<float> values(static_cast<size_t>(tokens_ * part.count));
        std::vector<float*> out;
        for (int t = 0; t < tokens_; ++t) out.push_back(values.data() + t * part.count);
        for (int p = 0; p < mlp_.num_projections; ++p) {
            const Projection& own = mlp_.projections[p];
            const Span ahead = p + 1 < mlp_.num_projections ? projection_rows(p + 1, part) : projection_rows(0, next);
            inputs_.of(p).dot(pointers(projection_rows(p, part), ahead).data(), part.count, out.data());
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
    void reduce_part(const std::deque<Inputs>& inner, int64_t first, int64_t next, float* out) const {
        const int64_t units = mlp_.units.count;
        std::vector<float> values(static_cast<size_t>(tokens_ * kTaskRows));
        std::vector<float*> products;
        for (int t = 0; t < tokens_; ++t) products.push_back(values.data() + t * kTaskRows);
        for (int64_t u = 0; u < units; ++u) {
            const Span rows = down_rows(u, first), ahead = u + 1 < units ? down_rows(u + 1, first) : down_rows(0, next);
            inner[static_cast<size_t>(u)].dot(pointers(rows, ahead).data(), rows.count, products.data());
            for (int t = 0; t < tokens_; ++t) {
                float* const to = out + t * mlp_.units.length + first;
                for (int64_t i = 0; i < rows.count; ++i) to[i] += products[t][i];
            }
        }
    }

    const Mlp& mlp_;
    const int64_t tokens_, block_;
    const ProjectionInputs inputs_;
    std::vector<float> inner_;  // [units, tokens, block]
};

}  // namespace

void mlp_blocks(const Mlp& mlp, const float* x, int tokens, float* out, int threads) {
    Blocks blocks(mlp, x, tokens);
    blocks.project(threads);
    blocks.reduce(out, threads);
}

}  // namespace coldpress
