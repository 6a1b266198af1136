#include "rows.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <vector>

#include "cpu.h"
#include "pool.h"

namespace coldpress {
namespace {

// A product has about kTasks tasks, within these sizes.
constexpr int64_t kLeastTaskBytes = 16 << 10, kMostTaskBytes = 128 << 10, kTasks = 32;
constexpr int64_t kPartBytes = 512 << 10, kMostParts = 16;  // bytes of rows with a separate sum, and most such parts

int64_t bytes_of(const Rows& rows) { return rows.count * row_bytes(rows.format, rows.length); }

int useful_threads(const Rows& rows, int threads) { return threads_worth(bytes_of(rows), kThreadBytes, threads); }

// The rows [first, last), followed by kRowsAhead rows from `next` on, as kernels expect them.
std::vector<const uint8_t*> pointers(const Rows& rows, int64_t first, int64_t last, int64_t next) {
    std::vector<const uint8_t*> found;
    found.reserve(static_cast<size_t>(last - first + kRowsAhead));
    for (int64_t i = first; i < last; ++i) found.push_back(rows.at(i));
    for (int64_t i = next; i < next + kRowsAhead; ++i) found.push_back(rows.at(i < rows.count ? i : last - 1));
    return found;
}

int64_t rows_per_task(const Rows& rows) {
    const int64_t bytes = std::max<int64_t>(1, row_bytes(rows.format, rows.length));
    return std::max<int64_t>(4, std::clamp(bytes_of(rows) / kTasks, kLeastTaskBytes, kMostTaskBytes) / bytes / 4 * 4);
}

}  // namespace

int64_t parts_of(int64_t count, int64_t step) { return count == 0 ? 0 : (count + step - 1) / step; }

RoundedVector::RoundedVector(Format format, const float* x, int64_t length, int bits) {
    const int64_t blocks = blocks_of(length), room = (blocks + kRoundedBlocks - 1) / kRoundedBlocks * kRoundedBlocks;
    const int planes = bits / 8;
    const auto lines = [room](int64_t bytes_per_block) { return (room * bytes_per_block + 63) / 64; };
    const int64_t numbers = lines(kBlock), wide = lines(8 * 4);
    memory_.resize(static_cast<size_t>(planes * (numbers + wide) + wide));
    uint8_t* next = memory_.data()->bytes;
    const auto take = [&next](int64_t count) {
        uint8_t* taken = next;
        next += 64 * count;
        return taken;
    };
    view_ = {planes, {}, reinterpret_cast<float*>(take(wide)), {}};
    for (int plane = 0; plane < planes; ++plane) {
        view_.planes[plane] = reinterpret_cast<int8_t*>(take(numbers));
        view_.starts[plane] = reinterpret_cast<int32_t*>(take(wide));
    }
    std::vector<float> padded(static_cast<size_t>(blocks * kBlock));
    std::copy_n(x, length, padded.begin());
    kernels().round(format, padded.data(), blocks, view_);
}

Inputs::Inputs(Format format, const float* x, int tokens, int64_t length, int bits) : format_(format), length_(length) {
    for (int t = 0; t < tokens; ++t, x += length) {
        if (bits != 0 && format != Format::fp16) {
            views_.push_back(rounded_.emplace_back(format, x, length, bits).view());
        } else {
            Floats& own = padded_.emplace_back(padded_values(length));
            std::copy_n(x, length, own.data());
            floats_.push_back(own.data());
        }
    }
}

void Inputs::dot_some(int first, int tokens, const uint8_t* const* at, int64_t count, float* const* out) const {
    if (floats_.empty()) return kernels().dot_rounded(format_, at, count, length_, tokens, &views_[first], out);
    kernels().dot(format_, at, count, length_, tokens, &floats_[first], out);
}

PartSums::PartSums(int64_t parts, int64_t length)
    : length_(length), width_(padded_values(length)), given_(static_cast<size_t>(parts)) {}

float* PartSums::take() {
    float* sums = nullptr;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (free_.empty()) return memory_.emplace_back(width_).data();
        sums = free_.back();
        free_.pop_back();
    }
    std::fill_n(sums, width_, 0.0f);
    return sums;
}

void PartSums::give(int64_t part, float* sums) {
    const std::lock_guard<std::mutex> lock(mutex_);
    given_[static_cast<size_t>(part)] = sums;
    for (; next_ < given_.size() && given_[next_]; ++next_) {
        if (next_ == 0) continue;
        for (int64_t j = 0; j < width_; ++j) given_[0][j] += given_[next_][j];
        free_.push_back(given_[next_]);
    }
}

void PartSums::total(float* out) const {
    if (given_.empty())
        std::fill_n(out, length_, 0.0f);
    else
        std::copy_n(given_[0], length_, out);
}

void dot(const Rows& rows, const float* x, int tokens, int bits, float* out, int threads) {
    const Inputs inputs(rows.format, x, tokens, rows.length, bits);
    const int64_t step = rows_per_task(rows);
    const int useful = threads_worth(tokens * bytes_of(rows), kThreadBytes, threads);
    compute_pool().run_in_sight(parts_of(rows.count, step), useful, [&](int64_t task, int64_t next) {
        const int64_t first = task * step, last = std::min(rows.count, first + step);
        const auto at = pointers(rows, first, last, next * step);
        std::vector<float*> to;
        for (int t = 0; t < tokens; ++t) to.push_back(out + t * rows.count + first);
        inputs.dot(at.data(), last - first, to.data());
    });
}

void axpy(const Rows& rows, const float* coefficients, float* out, int threads) {
    // Parts depend only on the rows, so that the number of threads changes no bit.
    const int64_t most = std::clamp<int64_t>(bytes_of(rows) / kPartBytes, 1, kMostParts);
    const int64_t step = (rows.count + most - 1) / most, parts = parts_of(rows.count, step);
    PartSums sums(parts, rows.length);
    compute_pool().run_in_sight(parts, useful_threads(rows, threads), [&](int64_t part, int64_t next) {
        const int64_t first = part * step, last = std::min(rows.count, first + step);
        float* const y = sums.take();
        const float* const own = coefficients + first;
        const auto at = pointers(rows, first, last, next * step);
        kernels().axpy(rows.format, at.data(), last - first, rows.length, 1, &own, &y);
        sums.give(part, y);
    });
    sums.total(out);
}

void decode(const Rows& rows, float* out, int threads) {
    const int64_t step = rows_per_task(rows);
    compute_pool().run((rows.count + step - 1) / step, useful_threads(rows, threads), [&](int64_t task) {
        for (int64_t i = task * step; i < std::min(rows.count, (task + 1) * step); ++i)
            kernels().decode(rows.format, rows.at(i), rows.length, kBlock, false, out + i * rows.length);
    });
}

uint64_t read_through(const uint64_t* words, int64_t count, int threads) {
    constexpr int64_t step = 64 << 10;
    std::atomic<uint64_t> all{0};
    compute_pool().run((count + step - 1) / step, threads, [&](int64_t task) {
        const uint64_t* const last = words + std::min(count, (task + 1) * step);
        all ^= std::accumulate(words + task * step, last, uint64_t{0}, std::bit_xor<uint64_t>());
    });
    return all;
}

}  // namespace coldpress
