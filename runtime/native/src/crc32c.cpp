#include "crc32c.h"

#include <cstring>

#include "cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define COLDPRESS_CRC_TARGET __attribute__((target("sse4.2,crc32")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#if defined(__clang__)
#define COLDPRESS_CRC_TARGET __attribute__((target("crc")))
#else
#define COLDPRESS_CRC_TARGET __attribute__((target("+crc")))
#endif
#endif

namespace coldpress {
namespace {

struct Tables {
    uint32_t table[8][256];
    Tables() {
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t crc = i;
            for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0u);
            table[0][i] = crc;
        }
        for (int t = 1; t < 8; ++t)
            for (int i = 0; i < 256; ++i) table[t][i] = (table[t - 1][i] >> 8) ^ table[0][table[t - 1][i] & 255];
    }
};

uint64_t load64(const uint8_t* p) {
    uint64_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

// The state is the complement of the checksum, as in every function of this file.
uint32_t update_portable(uint32_t crc, const uint8_t* data, int64_t bytes) {
    static const Tables tables;
    const auto& t = tables.table;
    for (; bytes >= 8; bytes -= 8, data += 8) {
        const uint64_t w = load64(data) ^ crc;
        crc = t[7][w & 255] ^ t[6][w >> 8 & 255] ^ t[5][w >> 16 & 255] ^ t[4][w >> 24 & 255] ^ t[3][w >> 32 & 255] ^
              t[2][w >> 40 & 255] ^ t[1][w >> 48 & 255] ^ t[0][w >> 56];
    }
    for (; bytes > 0; --bytes, ++data) crc = (crc >> 8) ^ t[0][(crc ^ *data) & 255];
    return crc;
}

#if defined(COLDPRESS_CRC_TARGET)
#if defined(__x86_64__)
COLDPRESS_CRC_TARGET inline uint32_t step64(uint32_t crc, uint64_t word) {
    return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
COLDPRESS_CRC_TARGET inline uint32_t step8(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
#else
COLDPRESS_CRC_TARGET inline uint32_t step64(uint32_t crc, uint64_t word) { return __crc32cd(crc, word); }
COLDPRESS_CRC_TARGET inline uint32_t step8(uint32_t crc, uint8_t byte) { return __crc32cb(crc, byte); }
#endif

COLDPRESS_CRC_TARGET uint32_t update_instructions(uint32_t crc, const uint8_t* data, int64_t bytes) {
    for (; bytes >= 8; bytes -= 8, data += 8) crc = step64(crc, load64(data));
    for (; bytes > 0; --bytes, ++data) crc = step8(crc, *data);
    return crc;
}

// The hardware prefetcher stops at the end of a page, so without prefetches three streams of one page each would mostly
// wait for memory. Prefetching an address behind the data has no effect.
constexpr int64_t kPagesAhead = 6, kLineBytes = 64;

COLDPRESS_CRC_TARGET void three_pages(const uint8_t* data, int64_t page_bytes, uint32_t* out) {
    uint32_t a = ~0u, b = ~0u, c = ~0u;
    const int64_t whole = page_bytes / 8 * 8, rest = page_bytes % 8;
    for (int64_t i = 0; i < whole; i += 8) {
        if (i % kLineBytes == 0)
            for (int64_t page = kPagesAhead; page < kPagesAhead + 3; ++page)
                __builtin_prefetch(data + page * page_bytes + i);
        a = step64(a, load64(data + i));
        b = step64(b, load64(data + page_bytes + i));
        c = step64(c, load64(data + 2 * page_bytes + i));
    }
    out[0] = ~update_instructions(a, data + whole, rest);
    out[1] = ~update_instructions(b, data + page_bytes + whole, rest);
    out[2] = ~update_instructions(c, data + 2 * page_bytes + whole, rest);
}
#endif

uint32_t update(uint32_t crc, const uint8_t* data, int64_t bytes) {
#if defined(COLDPRESS_CRC_TARGET)
    if (use_crc_instructions()) return update_instructions(crc, data, bytes);
#endif
    return update_portable(crc, data, bytes);
}

}  // namespace

void crc32c_pages(const uint8_t* data, int64_t pages, int64_t page_bytes, uint32_t* out) {
    int64_t i = 0;
#if defined(COLDPRESS_CRC_TARGET)
    if (use_crc_instructions())
        for (; i + 3 <= pages; i += 3) three_pages(data + i * page_bytes, page_bytes, out + i);
#endif
    for (; i < pages; ++i) out[i] = ~update(~0u, data + i * page_bytes, page_bytes);
}

uint32_t crc32c_padded(const uint8_t* data, int64_t bytes, int64_t zeros) {
    static const uint8_t nothing[4096] = {};
    uint32_t crc = update(~0u, data, bytes);
    for (; zeros > 0; zeros -= static_cast<int64_t>(sizeof nothing))
        crc = update(crc, nothing, zeros < static_cast<int64_t>(sizeof nothing) ? zeros : sizeof nothing);
    return ~crc;
}

}  // namespace coldpress
