// Products with many rows, split over threads. All arguments are checked by the caller (module.cpp).
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "floats.h"
#include "formats.h"
#include "rounded.h"

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

// Where the rows [first, last) begin, and behind them kRowsAhead from `next` on, as kernels want it.
std::vector<const uint8_t*> pointers(const Rows& rows, int64_t first, int64_t last, int64_t next);

// Threads are woken for so many bytes each: a thread that sleeps takes some ten microseconds to come, and those of a phone
// or a busy machine up to fifty, in which the others go through about as much.
constexpr int64_t kThreadBytes = 512 << 10;

// How many parts of `step` rows there are, the last one maybe smaller.
int64_t parts_of(int64_t count, int64_t step);

// How many rows a task should have.
int64_t rows_per_task(const Rows& rows);

// What rows are multiplied with: a vector in the kernels' order, or rounded to whole numbers where `bits` is 8 or 16
// and the format has codes. Bits are 0 for float32.
class Input {
   public:
    Input(Format format, const float* x, int64_t length, int bits);

    // out[i] = dot(at[i], x); kRowsAhead rows to be read next are behind `count`
    void dot(const uint8_t* const* at, int64_t count, float* out) const;

   private:
    Format format_;
    int64_t length_;
    std::optional<Floats> arranged_;
    std::optional<RoundedVector> rounded_;
};

// The sum of parts, added up in order whoever is done first. There is memory for as many as are at work or wait for an
// earlier one, since what was touched a moment ago is still near.
class PartSums {
   public:
    PartSums(int64_t parts, int64_t length);

    // Zeros in the kernels' order, to sum a part up in, and what was made of them. Threads may call these at once.
    float* take();
    void give(int64_t part, float* sums);

    // out[length] = the sum of all parts
    void total(Format format, float* out) const;

   private:
    int64_t length_, width_;
    std::mutex mutex_;
    std::deque<Floats> memory_;
    std::vector<float*> free_, given_;  // given_ by part
    size_t next_ = 0;                   // the first part that is not in the sum, which is in that of part 0
};

// out[i] = dot(row i, x[length]), with x as Input takes it
void dot(const Rows& rows, const float* x, int bits, float* out, int threads);

// out[t, i] = dot(row i, x[t, length]) of `tokens` vectors, each to the bits that `dot` gives; rows are read once
void dot_each(const Rows& rows, const float* x, int tokens, int bits, float* out, int threads);

// out[length] = sum over i of coefficients[i] * row i; how terms are grouped hangs on the rows' number and size alone
void axpy(const Rows& rows, const float* coefficients, float* out, int threads);

// out[i, length] = row i
void decode(const Rows& rows, float* out, int threads);

// Reads words from beginning to end and does as good as nothing with them; their exclusive or.
uint64_t read_through(const uint64_t* words, int64_t count, int threads);

}  // namespace coldpress
