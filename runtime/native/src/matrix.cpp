#include "matrix.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "cpu.h"
#include "pool.h"

namespace coldpress {
namespace {

constexpr int64_t kTaskRows = 48;            // rows of weights in a task, decoded to 51 kB at a time
constexpr int64_t kTaskBlocks = 8;           // columns of a task, also of the largest block; decoded to 256 kB at a time
constexpr int64_t kPackedBytes = 8 << 20;    // bytes of vectors packed at a time
constexpr int64_t kLineValues = 16;
constexpr int64_t kThreadProducts = 512 << 10;  // products for which a thread takes part (kThreadBytes)

// A thread's scratch memory, kept from task to task with undefined values; the thread's next call may move it.
float* scratch(int64_t count) {
    thread_local std::vector<float> memory;
    if (static_cast<int64_t>(memory.size()) < count) memory.resize(static_cast<size_t>(count));
    return memory.data();
}

std::unique_ptr<float[]> room(int64_t count) { return std::unique_ptr<float[]>(new float[static_cast<size_t>(count)]); }

// out[k][t] = x[t][k] for up to kBlock vectors, padded with zero vectors, a cache line at a time.
void pack_panel(const float* x, int64_t tokens, int64_t length, float* out) {
    for (int64_t first = 0; first < length; first += kLineValues) {
        const int64_t last = std::min(length, first + kLineValues);
        for (int64_t t = 0; t < kBlock; ++t)
            for (int64_t k = first; k < last; ++k) out[k * kBlock + t] = t < tokens ? x[t * length + k] : 0.0f;
    }
}

// Products of up to kTaskRows rows from `first` on with all panels.
void multiply_rows(const Rows& rows, int64_t first, const float* packed, int64_t tokens, float* out) {
    const int64_t count = std::min(kTaskRows, rows.count - first), panels = blocks_of(tokens);
    float* const weights = scratch(kTaskRows * (kDepthStride + panels * kBlock));
    float* const sums = weights + kTaskRows * kDepthStride;
    std::fill_n(sums, panels * kTaskRows * kBlock, 0.0f);
    for (int64_t from = 0; from < rows.length; from += kDepth) {
        const int64_t depth = std::min(kDepth, rows.length - from);
        const int64_t skipped = row_bytes(rows.format, from);
        for (int64_t r = 0; r < count; ++r)
            kernels().decode(rows.format, rows.at(first + r) + skipped, depth, kBlock, false, weights + r * kDepthStride);
        for (int64_t p = 0; p < panels; ++p)
            kernels().multiply(weights, count, packed + (p * rows.length + from) * kBlock, depth,
                               sums + p * kTaskRows * kBlock, kBlock);
    }
    for (int64_t t = 0; t < tokens; ++t) {
        const float* const of_token = sums + t / kBlock * kTaskRows * kBlock + t % kBlock;
        for (int64_t r = 0; r < count; ++r) out[t * rows.count + first + r] = of_token[r * kBlock];
    }
}

// Adds products with `depth` rows from `first` on to up to kTaskBlocks blocks of columns; `factors` holds each token's
// factors, kDepthStride apart.
void add_columns(const Rows& rows, int64_t first, int64_t depth, int64_t block, const float* factors, int64_t tokens,
                 float* out) {
    const int64_t begin = block * kBlock, values = std::min(kTaskBlocks * kBlock, rows.length - begin);
    const int64_t panel = depth * kBlock, skipped = row_bytes(rows.format, begin);
    float* const weights = scratch(kTaskBlocks * panel + tokens * kBlock);
    float* const partial = weights + kTaskBlocks * panel;
    for (int64_t k = 0; k < depth; ++k)
        kernels().decode(rows.format, rows.at(first + k) + skipped, values, panel, true, weights + k * kBlock);
    for (int64_t b = 0; b < blocks_of(values); ++b) {
        const int64_t width = std::min(kBlock, values - b * kBlock);
        float* const to = out + begin + b * kBlock;
        if (width == kBlock) {
            kernels().multiply(factors, tokens, weights + b * panel, depth, to, rows.length);
            continue;
        }
        std::fill_n(partial, tokens * kBlock, 0.0f);
        kernels().multiply(factors, tokens, weights + b * panel, depth, partial, kBlock);
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t j = 0; j < width; ++j) to[t * rows.length + j] += partial[t * kBlock + j];
    }
}

}  // namespace

void matmul(const Rows& rows, const float* x, int64_t tokens, float* out, int wanted) {
    const int threads = threads_worth(rows.count * rows.length * tokens, kThreadProducts, wanted);
    const int64_t fitting = kPackedBytes / (4 * std::max<int64_t>(1, rows.length)) / kBlock * kBlock;
    const int64_t most = std::max(kBlock, fitting), packed_tokens = std::min(most, blocks_of(tokens) * kBlock);
    const auto packed = room(packed_tokens * rows.length);
    for (int64_t first = 0; first < tokens; first += most) {
        const int64_t taken = std::min(most, tokens - first);
        compute_pool().run(blocks_of(taken), threads, [&](int64_t p) {
            pack_panel(x + (first + p * kBlock) * rows.length, std::min(kBlock, taken - p * kBlock), rows.length,
                       packed.get() + p * rows.length * kBlock);
        });
        compute_pool().run((rows.count + kTaskRows - 1) / kTaskRows, threads, [&](int64_t task) {
            multiply_rows(rows, task * kTaskRows, packed.get(), taken, out + first * rows.count);
        });
    }
}

void matmul_t(const Rows& rows, const float* c, int64_t tokens, float* out, int wanted) {
    const int64_t at_once = std::min(kDepth, rows.count) * rows.length * tokens;
    const int threads = threads_worth(at_once, kThreadProducts, wanted);
    const auto factors = room(tokens * kDepthStride);
    std::fill_n(out, tokens * rows.length, 0.0f);
    for (int64_t first = 0; first < rows.count; first += kDepth) {
        const int64_t depth = std::min(kDepth, rows.count - first);
        for (int64_t t = 0; t < tokens; ++t)
            std::copy_n(c + t * rows.count + first, depth, factors.get() + t * kDepthStride);
        compute_pool().run((blocks_of(rows.length) + kTaskBlocks - 1) / kTaskBlocks, threads, [&](int64_t task) {
            add_columns(rows, first, depth, task * kTaskBlocks, factors.get(), tokens, out);
        });
    }
}

}  // namespace coldpress
