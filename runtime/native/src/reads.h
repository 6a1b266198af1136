// Many reads in flight from one file, every page checked against its CRC32C by the thread that read it.
#pragma once

#include <cstdint>

namespace coldpress {

struct Extents {
    const uint64_t* offsets;         // in the file, multiples of page_bytes
    const uint64_t* lengths;         // multiples of page_bytes
    const uint64_t* buffer_offsets;  // where each extent's bytes go
    int64_t count;
};

struct ReadResult {
    int64_t bad_page = -1;       // the lowest page of the file whose checksum differs, -1 if none
    int error = 0;               // errno of the failure at the lowest file offset, 0 if none
    uint64_t error_offset = 0;   // that offset,
    uint64_t missing_bytes = 0;  // and how much the file ends before it should; 0 for other failures
};

ReadResult read_extents(int fd, const Extents& extents, uint8_t* buffer, int64_t page_bytes,
                        const uint32_t* page_crc32c, int threads);

}  // namespace coldpress
