// Linux's io_uring, by system calls only: one call submits many reads, and completions are taken from shared memory.
#pragma once

#include <cstdint>
#include <functional>

namespace coldpress {

// For one thread at a time.
class Ring {
   public:
    static constexpr unsigned kEntries = 256;  // reads in flight at once, at most

    Ring();
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // 0, or the errno with which the kernel refuses; ENOSYS also if it is too old to read into plain memory.
    int error() const { return error_; }
    // Adds a read, which the next `enter` submits; `tag` comes back with its completion. At most kEntries may be added
    // or in flight together. With `async` the kernel waits for the device in a separate thread.
    void add(int fd, uint8_t* into, uint64_t length, uint64_t offset, uint64_t tag, bool async);
    // Submits the added reads; with `wait`, returns when at least one read has ended. If the kernel refuses the call, as
    // behind a filter of system calls, refused(tag, -errno) is called for each read that it has not taken; reads in
    // flight end all the same.
    void enter(bool wait, const std::function<void(uint64_t, int32_t)>& refused);
    // Calls ended(tag, bytes read or -errno) for every read that has ended since the last call.
    void reap(const std::function<void(uint64_t, int32_t)>& ended);

   private:
    struct Shared;
    int error_ = 0;
    int fd_ = -1;
    unsigned added_ = 0;
    Shared* shared_ = nullptr;
};

}  // namespace coldpress
