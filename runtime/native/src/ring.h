// Linux' io_uring by its system calls alone: reads handed to the kernel in one call, their ends taken from shared memory.
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

    // 0, or the errno with which the kernel refuses; ENOSYS also where it is too old to read into plain memory.
    int error() const { return error_; }
    // Adds a read to those that `enter` hands over; `tag` comes back with its end. Not more than kEntries may be added
    // or in flight together. `async` has the kernel wait for the device in a thread of its own.
    void add(int fd, uint8_t* into, uint64_t length, uint64_t offset, uint64_t tag, bool async);
    // Hands over what was added; with `wait`, returns when at least one read has ended.
    void enter(bool wait);
    // Calls ended(tag, bytes read or -errno) for every read that has ended since.
    void reap(const std::function<void(uint64_t, int32_t)>& ended);

   private:
    struct Shared;
    int error_ = 0;
    int fd_ = -1;
    unsigned added_ = 0;
    Shared* shared_ = nullptr;
};

}  // namespace coldpress
