// Products of rows with several vectors, split over threads by rows.
#include <algorithm>
#include <vector>

#include "cpu.h"
#include "pool.h"
#include "rows.h"

namespace coldpress {
namespace {

// Vectors of float32 with zeros behind their ends.
class Padded {
   public:
    Padded(const float* x, int64_t length, int count) : memory_(count * padded_values(length)) {
        for (int t = 0; t < count; ++t) {
            vectors_.push_back(memory_.data() + t * padded_values(length));
            std::copy_n(x + t * length, length, memory_.data() + t * padded_values(length));
        }
    }

    const float* const* data() const { return vectors_.data(); }

   private:
    Floats memory_;
    std::vector<const float*> vectors_;
};

// Calls task(first row, pointers to rows, count) over all rows.
template <typename Task>
void over_tasks(const Rows& rows, int tokens, int threads, const Task& task) {
    const int64_t step = rows_per_task(rows);
    const int64_t work = tokens * rows.count * row_bytes(rows.format, rows.length);
    const int64_t tasks = (rows.count + step - 1) / step;
    compute_pool().run_in_sight(tasks, threads_worth(work, kThreadBytes, threads), [&](int64_t number, int64_t next) {
        const int64_t first = number * step, last = std::min(rows.count, first + step);
        const auto at = pointers(rows, first, last, next * step);
        task(first, at.data(), last - first);
    });
}

}  // namespace

void dot_each(const Rows& rows, const float* x, int tokens, int bits, float* out, int threads) {
    if (bits != 0 && rows.format != Format::fp16) {
        std::vector<Input> inputs;
        for (int t = 0; t < tokens; ++t) inputs.emplace_back(rows.format, x + t * rows.length, rows.length, bits);
        return over_tasks(rows, tokens, threads, [&](int64_t first, const uint8_t* const* at, int64_t count) {
            for (int t = 0; t < tokens; ++t)  // a task's rows stay in the cache from one vector to the next
                inputs[static_cast<size_t>(t)].dot(at, count, out + t * rows.count + first);
        });
    }
    const Padded inputs(x, rows.length, tokens);
    over_tasks(rows, tokens, threads, [&](int64_t first, const uint8_t* const* at, int64_t count) {
        std::vector<float*> to;
        for (int t = 0; t < tokens; ++t) to.push_back(out + t * rows.count + first);
        kernels().dot_tokens(rows.format, at, count, rows.length, tokens, inputs.data(), to.data());
    });
}

}  // namespace coldpress
