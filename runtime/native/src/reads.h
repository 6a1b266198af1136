// Many reads in flight from one file; every page is checked against its CRC32C while others are still being read.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "pool.h"

namespace coldpress {

struct Extents {
    const uint64_t* offsets;         // in the file, multiples of page_bytes
    const uint64_t* lengths;         // multiples of page_bytes
    const uint64_t* buffer_offsets;  // where each extent's bytes go
    int64_t count;
};

// Units to copy out of the buffer; the thread that has checked their pages copies them.
struct Landing {
    const int64_t* offsets;  // of each unit in the buffer, ascending
    const int32_t* slots;    // row of `rows` that it goes to
    int64_t count;
    int64_t unit_bytes;
    uint8_t* rows;  // of unit_bytes, one behind another
};

// The reads and their destinations; all pointers must outlive the reads.
struct Request {
    int fd;
    Extents extents;  // used only while reads are made
    uint8_t* buffer;
    int64_t page_bytes;
    const uint32_t* page_crc32c;
    Landing landing;
};

struct ReadResult {
    int64_t bad_page = -1;       // the lowest page of the file whose checksum differs, -1 if none
    int error = 0;               // errno of the failure at the lowest file offset, 0 if none
    uint64_t error_offset = 0;   // that offset,
    uint64_t missing_bytes = 0;  // and the bytes missing at the file's end; 0 for other failures
};

// Reads that begin in the constructor; the destructor waits for all of them. In a forked child, which does not have their
// threads, they fail with ECANCELED.
class Reads {
   public:
    virtual ~Reads() = default;
    Reads(const Reads&) = delete;
    Reads& operator=(const Reads&) = delete;

    // Waits until the first `count` extents were read; returns whether all of them are complete and correct.
    bool wait(int64_t count);
    // Waits for all reads. All are made even after a failure, so that the reported failure is always the first in the
    // file.
    ReadResult finish();

   protected:
    struct Piece {
        uint64_t offset, length, buffer_offset;
    };
    explicit Reads(const Request& request);
    // The thread that will check a piece calls this once, when `got` bytes of it were read: fewer than its length at
    // the end of the file or, with `error` set, on a failure.
    void arrived(int64_t index, uint64_t got, int error);
    bool is_of_parent() const { return forks_ != num_forks(); }

    const int fd_;
    uint8_t* const buffer_;
    std::vector<Piece> pieces_;

   private:
    void land(const Piece& piece);

    const int64_t page_bytes_;
    const uint32_t* const page_crc32c_;
    const Landing landing_;
    const int forks_ = num_forks();
    std::vector<int64_t> stops_;  // index after each extent's last piece

    std::mutex mutex_;
    std::condition_variable some_ready_;
    std::vector<bool> read_;
    int64_t ready_ = 0;    // leading pieces that were all read
    int64_t awaited_ = 0;  // leading pieces that a thread waits for
    int64_t whole_;        // pieces before the first that failed
    ReadResult result_;
};

// Reads each piece on a thread that sleeps in the system call, up to `threads` at once.
class ThreadReads : public Reads {
   public:
    ThreadReads(const Request& request, int threads);
    ~ThreadReads() override;

   private:
    void read(int64_t index);

    Pool::Started job_;
};

}  // namespace coldpress
