#include "reads.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <vector>

#include "crc32c.h"
#include "pool.h"

namespace coldpress {
namespace {

constexpr uint64_t kPieceBytes = 512 << 10;  // one thread's share of a long extent

struct Piece {
    uint64_t offset, length, buffer_offset;
};

std::vector<Piece> pieces_of(const Extents& extents, uint64_t page_bytes) {
    const uint64_t step = std::max<uint64_t>(1, kPieceBytes / page_bytes) * page_bytes;
    std::vector<Piece> pieces;
    for (int64_t i = 0; i < extents.count; ++i)
        for (uint64_t done = 0; done < extents.lengths[i]; done += step)
            pieces.push_back({extents.offsets[i] + done, std::min(step, extents.lengths[i] - done),
                              extents.buffer_offsets[i] + done});
    return pieces;
}

// Returns the number of bytes read; fewer than asked for at the end of the file or, with `error` set, on a failure.
uint64_t read_fully(int fd, const Piece& piece, uint8_t* into, int& error) {
    uint64_t done = 0;
    while (done < piece.length) {
        const ssize_t got = pread(fd, into + done, piece.length - done, static_cast<off_t>(piece.offset + done));
        if (got > 0) {
            done += static_cast<uint64_t>(got);
        } else if (got == 0) {
            break;
        } else if (errno != EINTR) {
            // After a partial read O_DIRECT refuses the odd offset: the file ended there.
            if (done == 0 || errno != EINVAL) error = errno;
            break;
        }
    }
    return done;
}

int64_t first_bad_page(const Piece& piece, const uint8_t* data, int64_t page_bytes, const uint32_t* expected) {
    constexpr int64_t batch = 48;
    uint32_t found[batch];
    const int64_t first = static_cast<int64_t>(piece.offset) / page_bytes;
    const int64_t pages = static_cast<int64_t>(piece.length) / page_bytes;
    for (int64_t start = 0; start < pages; start += batch) {
        const int64_t count = std::min(batch, pages - start);
        crc32c_pages(data + start * page_bytes, count, page_bytes, found);
        for (int64_t i = 0; i < count; ++i)
            if (found[i] != expected[first + start + i]) return first + start + i;
    }
    return -1;
}

}  // namespace

ReadResult read_extents(int fd, const Extents& extents, uint8_t* buffer, int64_t page_bytes,
                        const uint32_t* page_crc32c, int threads) {
    const std::vector<Piece> pieces = pieces_of(extents, static_cast<uint64_t>(page_bytes));
    ReadResult result;
    std::mutex mutex;
    // All pieces are read even after a failure, so that the failure reported is always the first in the file.
    read_pool().run(static_cast<int64_t>(pieces.size()), threads, [&](int64_t index) {
        const Piece& piece = pieces[static_cast<size_t>(index)];
        uint8_t* into = buffer + piece.buffer_offset;
        int error = 0;
        const uint64_t got = read_fully(fd, piece, into, error);
        if (got < piece.length) {
            const std::lock_guard<std::mutex> lock(mutex);
            if (result.error == 0 || piece.offset < result.error_offset) {
                result.error = error ? error : EIO;
                result.error_offset = piece.offset;
                result.missing_bytes = error ? 0 : piece.length - got;
            }
            return;
        }
        const int64_t bad = first_bad_page(piece, into, page_bytes, page_crc32c);
        if (bad < 0) return;
        const std::lock_guard<std::mutex> lock(mutex);
        if (result.bad_page < 0 || bad < result.bad_page) result.bad_page = bad;
    });
    return result;
}

}  // namespace coldpress
