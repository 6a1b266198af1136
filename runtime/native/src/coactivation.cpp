#include "coactivation.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu.h"
#include "pool.h"

namespace coldpress {
namespace {

constexpr int64_t kTileUnits = 64;   // rows that are compared with as many other rows at a time
constexpr int64_t kStepWords = 512;  // words of a row per step: the rows of a tile fill half of a core's cache

// Fills the cells of a tile whose rows begin at `first` and whose columns begin at `column`.
template <typename Count>
void count_tile(const uint64_t* words, int64_t num_units, int64_t num_words, int64_t first, int64_t column,
                Count* counts) {
    std::vector<int64_t> sums(kTileUnits * kTileUnits);
    for (int64_t start = 0; start < num_words; start += kStepWords) {
        const auto row = [&](int64_t unit) { return words + std::min(unit, num_units - 1) * num_words + start; };
        for (int64_t i = 0; i < kTileUnits; i += kBitRows)
            for (int64_t j = 0; j < kTileUnits; j += kBitRows) {
                const uint64_t *left[kBitRows], *right[kBitRows];  // rows behind the last one repeat it, and are dropped
                for (int k = 0; k < kBitRows; ++k) {
                    left[k] = row(first + i + k);
                    right[k] = row(column + j + k);
                }
                kernels().add_common_bits(left, right, std::min(kStepWords, num_words - start),
                                          &sums[static_cast<size_t>(i * kTileUnits + j)], kTileUnits);
            }
    }
    for (int64_t i = first; i < std::min(num_units, first + kTileUnits); ++i)
        for (int64_t j = std::max(column, i + 1); j < std::min(num_units, column + kTileUnits); ++j)
            counts[i * num_units + j] =
                static_cast<Count>(sums[static_cast<size_t>((i - first) * kTileUnits + j - column)]);
}

// Units that are linked to at most two others each, without a ring.
class Links {
   public:
    Links(int64_t num_units, const int32_t* units, int64_t count)
        : neighbours_(static_cast<size_t>(num_units)), parents_(static_cast<size_t>(num_units)), free_(units, units + count) {
        for (size_t i = 0; i < parents_.size(); ++i) {
            neighbours_[i] = {-1, -1};
            parents_[i] = static_cast<int32_t>(i);
        }
    }

    // Units that are not inside a link, ascending.
    const std::vector<int32_t>& free_units() {
        free_.erase(std::remove_if(free_.begin(), free_.end(), [&](int32_t unit) { return is_inside(unit); }),
                    free_.end());
        return free_;
    }

    bool is_one_path() { return free_.size() == 2 && root(free_[0]) == root(free_[1]); }

    bool is_inside(int32_t unit) const { return neighbours_[unit].second >= 0; }

    int32_t root(int32_t unit) {
        while (parents_[unit] != unit) unit = parents_[unit] = parents_[parents_[unit]];
        return unit;
    }

    void join(int32_t i, int32_t j) {
        if (is_inside(i) || is_inside(j) || root(i) == root(j)) return;
        parents_[root(j)] = root(i);
        add(i, j);
        add(j, i);
    }

    // Writes the path from its end with the lower id.
    void walk(int32_t* order, int64_t count) const {
        int32_t before = -1, unit = free_.empty() ? 0 : free_[0];
        for (int64_t place = 0; place < count; ++place) {
            order[place] = unit;
            const auto [first, second] = neighbours_[unit];
            const int32_t next = first != before ? first : second;
            before = unit;
            unit = next;
        }
    }

   private:
    void add(int32_t unit, int32_t other) {
        auto& [first, second] = neighbours_[unit];
        (first < 0 ? first : second) = other;
    }

    std::vector<std::pair<int32_t, int32_t>> neighbours_;
    std::vector<int32_t> parents_, free_;
};

// The pairs of free units of different links, in the order of i, then j.
template <typename Count>
class Pairs {
   public:
    Pairs(const Count* counts, int64_t num_units, Links& links) : counts_(counts), num_units_(num_units) {
        for (const int32_t unit : links.free_units()) {
            units_.push_back(unit);
            roots_.push_back(links.root(unit));
        }
    }

    template <typename Visit>
    void each(const Visit& visit) const {
        for (size_t x = 0; x < units_.size(); ++x) {
            const Count* row = counts_ + units_[x] * num_units_;
            for (size_t y = x + 1; y < units_.size(); ++y)
                if (roots_[x] != roots_[y]) visit(units_[x], units_[y], static_cast<int64_t>(row[units_[y]]));
        }
    }

   private:
    const Count* counts_;
    int64_t num_units_;
    std::vector<int32_t> units_, roots_;
};

}  // namespace

template <typename Count>
void count_pairs(const uint64_t* words, int64_t num_units, int64_t num_words, Count* counts, int threads) {
    const int64_t tiles = (num_units + kTileUnits - 1) / kTileUnits;
    compute_pool().run(tiles, threads, [=](int64_t tile) {
        for (int64_t column = tile; column < tiles; ++column)
            count_tile(words, num_units, num_words, tile * kTileUnits, column * kTileUnits, counts);
    });
}

template <typename Count>
void join_links(const Count* counts, int64_t num_units, const int32_t* units, int64_t num_ordered, int64_t run_pairs,
                int32_t* order) {
    Links links(num_units, units, num_ordered);
    int64_t highest = 0;
    Pairs(counts, num_units, links).each([&](int32_t, int32_t, int64_t count) { highest = std::max(highest, count); });
    while (highest >= 0) {
        const Pairs<Count> pairs(counts, num_units, links);
        if (links.is_one_path()) break;
        std::vector<int64_t> tally(static_cast<size_t>(highest + 1));
        pairs.each([&](int32_t, int32_t, int64_t count) {
            if (count <= highest) ++tally[static_cast<size_t>(count)];
        });
        int64_t lowest = highest, total = tally[static_cast<size_t>(highest)];
        while (lowest > 0 && total + tally[static_cast<size_t>(lowest - 1)] <= run_pairs)
            total += tally[static_cast<size_t>(--lowest)];
        if (total > run_pairs) {  // of a single count: its pairs come in the order in which they are joined
            pairs.each([&](int32_t i, int32_t j, int64_t count) {
                if (count == highest) links.join(i, j);
            });
        } else {
            std::vector<std::pair<int32_t, int32_t>> sorted(static_cast<size_t>(total));
            std::vector<int64_t> places(static_cast<size_t>(highest - lowest + 1));  // a stable counting sort
            for (int64_t count = highest - 1; count >= lowest; --count)
                places[static_cast<size_t>(count - lowest)] =
                    places[static_cast<size_t>(count + 1 - lowest)] + tally[static_cast<size_t>(count + 1)];
            pairs.each([&](int32_t i, int32_t j, int64_t count) {
                if (count >= lowest && count <= highest)
                    sorted[static_cast<size_t>(places[static_cast<size_t>(count - lowest)]++)] = {i, j};
            });
            for (const auto& [i, j] : sorted) links.join(i, j);
        }
        highest = lowest - 1;
    }
    links.free_units();
    links.walk(order, num_ordered);
}

template void count_pairs(const uint64_t*, int64_t, int64_t, uint16_t*, int);
template void count_pairs(const uint64_t*, int64_t, int64_t, uint32_t*, int);
template void join_links(const uint16_t*, int64_t, const int32_t*, int64_t, int64_t, int32_t*);
template void join_links(const uint32_t*, int64_t, const int32_t*, int64_t, int64_t, int32_t*);

}  // namespace coldpress
