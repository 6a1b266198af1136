#include "attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu.h"
#include "floats.h"
#include "formats.h"
#include "pool.h"

namespace coldpress {
namespace {

// Replaces scores s by cap * tanh(s / cap): tanh(x) is (1 - e) / (1 + e) with e = exp(-2 |x|), and has the sign of x.
void soft_cap(std::vector<float>& scores, float cap) {
    std::vector<float> e(scores.size());
    std::transform(scores.begin(), scores.end(), e.begin(), [cap](float s) { return -2.0f * std::abs(s) / cap; });
    kernels().exp_sum(e.data(), static_cast<int64_t>(e.size()), 0.0f);
    for (size_t i = 0; i < e.size(); ++i) scores[i] = std::copysign(cap * (1.0f - e[i]) / (1.0f + e[i]), scores[i]);
}

void attend_head(const Attention& a, int64_t head, float* out) {
    const int64_t kv_head = head / (a.heads / a.kv_heads), padded = padded_values(a.head_dim);
    const int64_t head_bytes = row_bytes(a.format, a.head_dim);
    const int64_t stride = a.kv_heads * head_bytes, offset = kv_head * head_bytes;
    const auto rows_of = [&](const uint8_t* tensor, int64_t t) { return tensor + t * stride + offset; };
    std::vector<const uint8_t*> rows(static_cast<size_t>(a.positions + kRowsAhead));
    std::vector<float> scores(static_cast<size_t>(a.positions));
    Floats query(padded), sums(padded);

    for (int64_t t = 0; t < a.positions; ++t) rows[static_cast<size_t>(t)] = rows_of(a.keys, t);
    for (int64_t t = 0; t < kRowsAhead; ++t)
        rows[static_cast<size_t>(a.positions + t)] = rows_of(a.values, std::min(t, a.positions - 1));
    std::transform(a.queries + head * a.head_dim, a.queries + (head + 1) * a.head_dim, query.data(),
                   [&a](float value) { return a.scale * value; });
    const float* const in = query.data();
    float *const found = scores.data(), *const y = sums.data();
    kernels().dot(a.format, rows.data(), a.positions, a.head_dim, 1, &in, &found);

    if (a.softcap > 0.0f) soft_cap(scores, a.softcap);

    float peak = *std::max_element(scores.begin(), scores.end());
    if (a.sinks) peak = std::max(peak, a.sinks[head]);
    float total = kernels().exp_sum(scores.data(), a.positions, peak);
    if (a.sinks) {
        float sink = a.sinks[head];
        total += kernels().exp_sum(&sink, 1, peak);
    }

    for (int64_t t = 0; t < a.positions; ++t) rows[static_cast<size_t>(t)] = rows_of(a.values, t);
    kernels().axpy(a.format, rows.data(), a.positions, a.head_dim, 1, &found, &y);
    std::transform(sums.data(), sums.data() + a.head_dim, out + head * a.head_dim,
                   [total](float sum) { return sum / total; });
}

}  // namespace

void attend(const Attention& a, float* out, int threads) {
    constexpr int64_t worth_a_thread = 64 << 10;  // products of a query and a key value
    const bool small = a.heads * a.head_dim * a.positions < worth_a_thread;
    compute_pool().run(a.heads, small ? 1 : threads, [&](int64_t head) { attend_head(a, head, out); });
}

}  // namespace coldpress
