// Counts how often units are active together, and joins them into one path (compiler/stages/order).
#pragma once

#include <cstdint>

namespace coldpress {

// counts[i, j] = the bits that rows i < j of `words` [num_units, num_words] have in common; other cells stay.
template <typename Count>
void count_pairs(const uint64_t* words, int64_t num_units, int64_t num_words, Count* counts, int threads);

// Ripple's Algorithm 1 (4.3): joins the nearest two links until one path holds the `num_ordered` units in `units`, which
// are ascending ids. It takes pairs by falling count, then by i, then by j; only cells i < j of counts [num_units,
// num_units] are read. It sorts at most `run_pairs` pairs at a time: this bounds memory and does not change the path.
template <typename Count>
void join_links(const Count* counts, int64_t num_units, const int32_t* units, int64_t num_ordered, int64_t run_pairs,
                int32_t* order);

}  // namespace coldpress
