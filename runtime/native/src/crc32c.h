// CRC32C (Castagnoli, reflected polynomial 0x82F63B78), by the processor's instruction where there is one.
#pragma once

#include <cstdint>

namespace coldpress {

// out[i] = CRC32C of the i-th page of `page_bytes` bytes at `data`. The checksums of pages are independent, so three at
// a time hide the instruction's latency of three cycles.
void crc32c_pages(const uint8_t* data, int64_t pages, int64_t page_bytes, uint32_t* out);

// CRC32C of `bytes` bytes followed by `zeros` zero bytes.
uint32_t crc32c_padded(const uint8_t* data, int64_t bytes, int64_t zeros);

}  // namespace coldpress
