#include "attention.h"

#include <algorithm>
#include <vector>

#include "cpu.h"
#include "formats.h"
#include "pool.h"

namespace coldpress {
namespace {

void attend_head(const Attention& a, int64_t head, float* out) {
    const int64_t kv_head = head / (a.heads / a.kv_heads), padded = blocks_of(a.head_dim) * kBlock;
    const int64_t head_bytes = row_bytes(a.format, a.head_dim);
    const int64_t stride = a.kv_heads * head_bytes, offset = kv_head * head_bytes;
    std::vector<const uint8_t*> rows(static_cast<size_t>(a.positions));
    std::vector<float> scores(static_cast<size_t>(a.positions));
    std::vector<float> query(static_cast<size_t>(padded)), sums(static_cast<size_t>(padded));

    for (int64_t t = 0; t < a.positions; ++t) rows[static_cast<size_t>(t)] = a.keys + t * stride + offset;
    std::transform(a.queries + head * a.head_dim, a.queries + (head + 1) * a.head_dim, query.begin(),
                   [&a](float value) { return a.scale * value; });
    kernels().dot(a.format, rows.data(), a.positions, a.head_dim, query.data(), scores.data());

    const float peak = *std::max_element(scores.begin(), scores.end());
    const float total = kernels().exp_sum(scores.data(), a.positions, peak);

    for (int64_t t = 0; t < a.positions; ++t) rows[static_cast<size_t>(t)] = a.values + t * stride + offset;
    kernels().axpy(a.format, rows.data(), a.positions, a.head_dim, scores.data(), sums.data());
    std::transform(sums.begin(), sums.begin() + a.head_dim, out + head * a.head_dim,
                   [total](float sum) { return sum / total; });
}

}  // namespace

void attend(const Attention& a, float* out, int threads) {
    constexpr int64_t worth_a_thread = 256 << 10;  // products of a query and a key value
    const bool small = a.heads * a.head_dim * a.positions < worth_a_thread;
    compute_pool().run(a.heads, small ? 1 : threads, [&](int64_t head) { attend_head(a, head, out); });
}

}  // namespace coldpress
