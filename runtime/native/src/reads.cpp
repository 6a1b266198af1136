#include "reads.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "crc32c.h"

namespace coldpress {
namespace {

constexpr uint64_t kPieceBytes = 1 << 20;  // most bytes that are read, and then checked, at once

// Returns the number of bytes read; fewer than asked for at the end of the file or, with `error` set, on a failure.
uint64_t read_fully(int fd, uint64_t offset, uint64_t length, uint8_t* into, int& error) {
    uint64_t done = 0;
    while (done < length) {
        const ssize_t got = pread(fd, into + done, length - done, static_cast<off_t>(offset + done));
        if (got > 0) {
            done += static_cast<uint64_t>(got);
        } else if (got == 0) {
            break;
        } else if (errno != EINTR) {
            // O_DIRECT refuses the unaligned offset after a partial read, which means that the file ended there.
            if (done == 0 || errno != EINVAL) error = errno;
            break;
        }
    }
    return done;
}

// `offset` and `length` refer to the file.
int64_t first_bad_page(uint64_t offset, uint64_t length, const uint8_t* data, int64_t page_bytes,
                       const uint32_t* expected) {
    constexpr int64_t batch = 48;
    uint32_t found[batch];
    const int64_t first = static_cast<int64_t>(offset) / page_bytes;
    const int64_t pages = static_cast<int64_t>(length) / page_bytes;
    for (int64_t start = 0; start < pages; start += batch) {
        const int64_t count = std::min(batch, pages - start);
        crc32c_pages(data + start * page_bytes, count, page_bytes, found);
        for (int64_t i = 0; i < count; ++i)
            if (found[i] != expected[first + start + i]) return first + start + i;
    }
    return -1;
}

}  // namespace

Reads::Reads(const Request& request)
    : fd_(request.fd),
      buffer_(request.buffer),
      page_bytes_(request.page_bytes),
      page_crc32c_(request.page_crc32c),
      landing_(request.landing) {
    const Extents& extents = request.extents;
    const uint64_t page = static_cast<uint64_t>(page_bytes_);
    const uint64_t step = std::max<uint64_t>(1, kPieceBytes / page) * page;
    stops_.reserve(static_cast<size_t>(extents.count));
    for (int64_t i = 0; i < extents.count; ++i) {
        for (uint64_t done = 0; done < extents.lengths[i]; done += step)
            pieces_.push_back({extents.offsets[i] + done, std::min(step, extents.lengths[i] - done),
                               extents.buffer_offsets[i] + done});
        stops_.push_back(static_cast<int64_t>(pieces_.size()));
    }
    read_.resize(pieces_.size());
    whole_ = static_cast<int64_t>(pieces_.size());
}

bool Reads::wait(int64_t count) {
    if (is_of_parent()) return false;  // before the lock, which a thread of the parent may have held
    const int64_t pieces = count ? stops_[static_cast<size_t>(count - 1)] : 0;
    std::unique_lock<std::mutex> lock(mutex_);
    awaited_ = pieces;
    some_ready_.wait(lock, [&] { return ready_ >= pieces; });
    return whole_ >= pieces;
}

ReadResult Reads::finish() {
    if (is_of_parent()) return {-1, ECANCELED, pieces_.empty() ? 0 : pieces_[0].offset, 0};
    wait(static_cast<int64_t>(stops_.size()));
    return result_;
}

// A unit may reach into other pieces; copies only its bytes in this piece.
void Reads::land(const Piece& piece) {
    const int64_t begin = static_cast<int64_t>(piece.buffer_offset), end = begin + static_cast<int64_t>(piece.length);
    const int64_t* const last = landing_.offsets + landing_.count;
    const int64_t* unit = std::upper_bound(landing_.offsets, last, begin - landing_.unit_bytes);
    for (; unit != last && *unit < end; ++unit) {
        const int64_t from = std::max(begin, *unit), to = std::min(end, *unit + landing_.unit_bytes);
        uint8_t* const row = landing_.rows + landing_.slots[unit - landing_.offsets] * landing_.unit_bytes;
        std::memcpy(row + (from - *unit), buffer_ + from, static_cast<size_t>(to - from));
    }
}

void Reads::arrived(int64_t index, uint64_t got, int error) {
    const Piece& piece = pieces_[static_cast<size_t>(index)];
    const bool cut = got < piece.length;
    const int64_t bad = cut ? -1
                            : first_bad_page(piece.offset, piece.length, buffer_ + piece.buffer_offset, page_bytes_,
                                             page_crc32c_);
    if (!cut && bad < 0) land(piece);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (cut && (result_.error == 0 || piece.offset < result_.error_offset)) {
        result_.error = error ? error : EIO;
        result_.error_offset = piece.offset;
        result_.missing_bytes = error ? 0 : piece.length - got;
    }
    if (bad >= 0 && (result_.bad_page < 0 || bad < result_.bad_page)) result_.bad_page = bad;
    if (cut || bad >= 0) whole_ = std::min(whole_, index);
    read_[static_cast<size_t>(index)] = true;
    const int64_t before = ready_;
    while (ready_ < static_cast<int64_t>(read_.size()) && read_[static_cast<size_t>(ready_)]) ++ready_;
    if (before < awaited_ && ready_ >= awaited_) some_ready_.notify_all();
}

ThreadReads::ThreadReads(const Request& request, int threads) : Reads(request) {
    job_ = read_pool().start(static_cast<int64_t>(pieces_.size()), threads, [this](int64_t index) { read(index); });
}

// The caller's thread helps with pieces that no thread has begun; there are none if it has waited for all.
ThreadReads::~ThreadReads() {
    if (is_of_parent())
        job_.release();  // its task refers to threads of the parent
    else
        read_pool().finish(*job_);
}

void ThreadReads::read(int64_t index) {
    const Piece& piece = pieces_[static_cast<size_t>(index)];
    int error = 0;
    const uint64_t got = read_fully(fd_, piece.offset, piece.length, buffer_ + piece.buffer_offset, error);
    arrived(index, got, error);
}

}  // namespace coldpress
