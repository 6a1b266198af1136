// Products with many rows, split over threads. The caller checks all arguments (bind_products.cpp).
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "floats.h"
#include "formats.h"
#include "kernels.h"

namespace coldpress {

// Rows that share a format and a length: row i begins at base + index(i) * stride, index(i) = slots[i], or i without.
struct Rows {
    const uint8_t* base;
    int64_t stride;
    const int32_t* slots;
    int64_t count;
    int64_t length;
    Format format;

    const uint8_t* at(int64_t i) const { return base + (slots ? slots[i] : i) * stride; }
};

// A thread takes part for at least this many bytes, about five microseconds of products: one that spins (pool.cpp) begins
// within a microsecond, and one that sleeps comes too late to do any, and delays nobody.
constexpr int64_t kThreadBytes = 32 << 10;

// Returns the number of parts of `step` rows; the last part may be smaller.
int64_t parts_of(int64_t count, int64_t step);

// A vector rounded to `bits`, 8 or 16, for rows of a format, which is not fp16, and its memory.
class RoundedVector {
   public:
    RoundedVector(Format format, const float* x, int64_t length, int bits);

    const Rounded& view() const { return view_; }

   private:
    struct alignas(64) Line {
        uint8_t bytes[64];
    };
    std::vector<Line> memory_;
    Rounded view_;
};

// Vectors that rows of one format multiply: float32, padded with zeros, if `bits` is 0 or the format has no codes, else
// rounded to whole numbers of 8 or 16 bits.
class Inputs {
   public:
    // x[t, length] of `tokens` vectors
    Inputs(Format format, const float* x, int tokens, int64_t length, int bits);

    // out[t][i] = dot(at[i], x[t]), each with the bits that it has alone; the `count` rows are followed by kRowsAhead
    // rows to be read next, and unpacked once for several vectors
    void dot(const uint8_t* const* at, int64_t count, float* const* out) const {
        dot_some(0, static_cast<int>(floats_.size() + views_.size()), at, count, out);
    }
    // The same with vector t alone
    void dot_one(int t, const uint8_t* const* at, int64_t count, float* out) const { dot_some(t, 1, at, count, &out); }

   private:
    void dot_some(int first, int tokens, const uint8_t* const* at, int64_t count, float* const* out) const;

    Format format_;
    int64_t length_;
    std::deque<Floats> padded_;
    std::deque<RoundedVector> rounded_;
    std::vector<const float*> floats_;  // of all vectors; empty if they are rounded
    std::vector<Rounded> views_;        // else these
};

// The sum of parts, added in order, no matter which part finishes first. Memory is reused as soon as a part is added,
// so that it is still in the cache; there is only as much as the parts at work, or waiting for an earlier one, need.
class PartSums {
   public:
    PartSums(int64_t parts, int64_t length);

    // `take` returns zeros for a part's sum; `give` adds the sum. Threads may call both at once.
    float* take();
    void give(int64_t part, float* sums);

    // out[length] = the sum of all parts
    void total(float* out) const;

   private:
    int64_t length_, width_;
    std::mutex mutex_;
    std::deque<Floats> memory_;
    std::vector<float*> free_, given_;  // given_ by part
    size_t next_ = 0;                   // the first part not yet added; the total is in part 0's memory
};

// out[t, i] = dot(row i, x[t, length]) for `tokens` vectors as Input takes them, each with the same bits as alone; rows
// are read once
void dot(const Rows& rows, const float* x, int tokens, int bits, float* out, int threads);

// out[length] = sum over i of coefficients[i] * row i; the grouping of terms depends only on the rows' number and size
void axpy(const Rows& rows, const float* coefficients, float* out, int threads);

// out[i, length] = row i
void decode(const Rows& rows, float* out, int threads);

// Reads words from beginning to end and returns their exclusive or: measures memory bandwidth.
uint64_t read_through(const uint64_t* words, int64_t count, int threads);

}  // namespace coldpress
