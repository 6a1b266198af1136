#include "plan.h"

namespace coldpress {
namespace {

struct Planner {
    const int64_t* positions;
    Strided units;
    ReadRules rules;

    int64_t start(int64_t i) const { return units.offset_bytes + positions[i] * units.stride_bytes; }
    // First byte of unit i's first page, and the byte behind its last page.
    int64_t low(int64_t i) const { return start(i) / rules.page_bytes * rules.page_bytes; }
    int64_t high(int64_t i) const {
        return (start(i) + units.unit_bytes + rules.page_bytes - 1) / rules.page_bytes * rules.page_bytes;
    }

    // Where to cut a read from unit `first` that is too long: it gets as long as allowed, or up to half shorter if a
    // cut there leaves no page to two reads.
    int64_t cut(int64_t first) const {
        int64_t longest = first;
        while (high(longest) - low(first) <= rules.max_bytes) ++longest;
        for (int64_t i = longest; i > first; --i)
            if (low(i) >= high(i - 1)) return high(i - 1) - low(first) >= rules.max_bytes / 2 ? i : longest;
        return longest;
    }

    // Bytes between the pages of unit i and those of the unit before it; negative if they share a page.
    int64_t between(int64_t i) const { return low(i) - high(i - 1); }
};

}  // namespace

PlannedReads plan_reads(const int64_t* positions, int64_t count, Strided units, ReadRules rules, int64_t* unit_extent,
                        int64_t* unit_offset) {
    const Planner planner{positions, units, rules};
    PlannedReads found;
    const auto add = [&](int64_t first, int64_t stop) {
        const int64_t low = planner.low(first);
        for (int64_t i = first; i < stop; ++i) {
            unit_extent[i] = static_cast<int64_t>(found.offsets.size());
            unit_offset[i] = planner.start(i) - low;
        }
        found.offsets.push_back(low);
        found.lengths.push_back(planner.high(stop - 1) - low);
    };
    for (int64_t first = 0, stop = 0; first < count; first = stop) {
        while (++stop < count && planner.between(stop) <= rules.gap_bytes) {
        }
        while (planner.high(stop - 1) - planner.low(first) > rules.max_bytes) {
            const int64_t cut = planner.cut(first);
            add(first, cut);
            first = cut;
        }
        add(first, stop);
    }
    return found;
}

void count_reads(const int64_t* positions, const int64_t* stops, int64_t num_requests, Strided units,
                 int64_t page_bytes, const int64_t* gaps, int64_t num_gaps, int64_t* reads, int64_t* read_bytes) {
    const Planner planner{positions, units, {page_bytes, 0, 0}};
    for (int64_t r = 0, i = 0; r < num_requests; ++r, reads += num_gaps, read_bytes += num_gaps)
        for (const int64_t first = i; i < stops[r]; ++i) {
            const int64_t own = planner.high(i) - planner.low(i), between = i > first ? planner.between(i) : 0;
            for (int64_t g = 0; g < num_gaps; ++g) {
                const bool joins = i > first && between <= gaps[g];
                reads[g] += !joins;
                read_bytes[g] += own + (joins ? between : 0);
            }
        }
}

}  // namespace coldpress
