// Counts how often units are active together, and joins them into one path (compiler/stages/order).
#pragma once

#include <cstdint>

namespace coldpress {

// counts[i, j] = the bits that rows i < j of `words` [num_units, num_words] have in common; other cells stay.
template <typename Count>
void count_pairs(const uint64_t* words, int64_t num_units, int64_t num_words, Count* counts, int threads);

// Ripple's Algorithm 1 (4.3): the nearest two links are joined until one path holds `num_ordered` of the units, ascending
// ids. Pairs are taken by falling count, then i, then j < num_units, of which counts [num_units, num_units] has i < j. At
// most `run_pairs` pairs are sorted at a time, which bounds memory and changes nothing.
template <typename Count>
void join_links(const Count* counts, int64_t num_units, const int32_t* units, int64_t num_ordered, int64_t run_pairs,
                int32_t* order);

}  // namespace coldpress
