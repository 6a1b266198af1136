// Plans the reads that bring units from flash (runtime/store/planner.py).
#pragma once

#include <cstdint>
#include <vector>

namespace coldpress {

// Unit p is `unit_bytes` at `offset_bytes + p * stride_bytes`.
struct Strided {
    int64_t offset_bytes, unit_bytes, stride_bytes;
};

// Reads are whole pages; those at most `gap_bytes` apart become one; none is longer than `max_bytes`.
struct ReadRules {
    int64_t page_bytes, gap_bytes, max_bytes;
};

struct PlannedReads {
    std::vector<int64_t> offsets, lengths;
};

// Plans the reads for units at `count` ascending positions. Unit i lies `unit_offset[i]` bytes behind the first byte of
// read `unit_extent[i]`.
PlannedReads plan_reads(const int64_t* positions, int64_t count, Strided units, ReadRules rules, int64_t* unit_extent,
                        int64_t* unit_offset);

// Counts the reads, and their bytes, of several requests under each of several gaps: [num_requests, num_gaps], to which it
// adds. Request r has the ascending positions from stops[r - 1] to stops[r]. Reads may be of any length.
void count_reads(const int64_t* positions, const int64_t* stops, int64_t num_requests, Strided units,
                 int64_t page_bytes, const int64_t* gaps, int64_t num_gaps, int64_t* reads, int64_t* read_bytes);

}  // namespace coldpress
