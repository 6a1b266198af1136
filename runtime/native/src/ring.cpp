#include "ring.h"

#include <cerrno>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#if defined(IORING_FEAT_RW_CUR_POS)  // headers of Linux 5.6, the first that can read into plain memory

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace coldpress {

struct Ring::Shared {
    uint8_t* rings;
    size_t rings_bytes;
    io_uring_sqe* entries;
    size_t entries_bytes;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    io_uring_cqe* ended;
};

namespace {

constexpr unsigned kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;

void* map(int fd, size_t bytes, off_t what) {
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    return found == MAP_FAILED ? nullptr : found;
}

}  // namespace

Ring::Ring() {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, kEntries, &params));
    if (fd_ < 0) {
        error_ = errno;
        return;
    }
    if ((params.features & kNeeded) != kNeeded) {
        error_ = ENOSYS;
        return;
    }
    const size_t entries_bytes = params.sq_entries * sizeof(io_uring_sqe);
    const size_t rings_bytes = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                                params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    auto* rings = static_cast<uint8_t*>(map(fd_, rings_bytes, IORING_OFF_SQ_RING));
    auto* entries = rings ? static_cast<io_uring_sqe*>(map(fd_, entries_bytes, IORING_OFF_SQES)) : nullptr;
    if (!entries) {
        error_ = errno;
        if (rings) munmap(rings, rings_bytes);
        return;
    }
    const auto word = [&](unsigned offset) { return reinterpret_cast<unsigned*>(rings + offset); };
    shared_ = new Shared{rings,
                         rings_bytes,
                         entries,
                         entries_bytes,
                         word(params.sq_off.tail),
                         word(params.sq_off.ring_mask),
                         word(params.sq_off.array),
                         word(params.cq_off.head),
                         word(params.cq_off.tail),
                         word(params.cq_off.ring_mask),
                         reinterpret_cast<io_uring_cqe*>(rings + params.cq_off.cqes)};
}

Ring::~Ring() {
    if (shared_) {
        munmap(shared_->entries, shared_->entries_bytes);
        munmap(shared_->rings, shared_->rings_bytes);
        delete shared_;
    }
    if (fd_ >= 0) close(fd_);
}

void Ring::add(int fd, uint8_t* into, uint64_t length, uint64_t offset, uint64_t tag, bool async) {
    const unsigned tail = *shared_->sq_tail, place = tail & *shared_->sq_mask;
    io_uring_sqe entry{};
    entry.opcode = IORING_OP_READ;
    entry.flags = async ? IOSQE_ASYNC : 0;
    entry.fd = fd;
    entry.off = offset;
    entry.addr = reinterpret_cast<uint64_t>(into);
    entry.len = static_cast<uint32_t>(length);
    entry.user_data = tag;
    shared_->entries[place] = entry;
    shared_->sq_array[place] = place;
    __atomic_store_n(shared_->sq_tail, tail + 1, __ATOMIC_RELEASE);
    ++added_;
}

void Ring::enter(bool wait, const std::function<void(uint64_t, int32_t)>& refused) {
    while (added_ || wait) {
        const long taken = syscall(__NR_io_uring_enter, fd_, added_, wait ? 1 : 0, wait ? IORING_ENTER_GETEVENTS : 0,
                                   nullptr, size_t{0});
        if (taken >= 0) {
            added_ -= static_cast<unsigned>(taken);
            wait = false;
        } else if (errno == EAGAIN || errno == EBUSY) {
            // The kernel is short of memory, or completions wait: reads in flight must end before more can begin.
            if (__atomic_load_n(shared_->cq_tail, __ATOMIC_ACQUIRE) != *shared_->cq_head) return;
            usleep(100);
        } else if (errno != EINTR) {
            const int32_t error = errno;
            const unsigned tail = *shared_->sq_tail;  // without a thread of its own, the kernel reads it in a call only
            __atomic_store_n(shared_->sq_tail, tail - added_, __ATOMIC_RELEASE);
            for (unsigned place = tail - std::exchange(added_, 0); place != tail; ++place)
                refused(shared_->entries[place & *shared_->sq_mask].user_data, -error);
            usleep(100);
            return;
        }
    }
}

void Ring::reap(const std::function<void(uint64_t, int32_t)>& ended) {
    unsigned head = *shared_->cq_head;
    const unsigned tail = __atomic_load_n(shared_->cq_tail, __ATOMIC_ACQUIRE);
    for (; head != tail; ++head) {
        const io_uring_cqe& entry = shared_->ended[head & *shared_->cq_mask];
        ended(entry.user_data, entry.res);
    }
    __atomic_store_n(shared_->cq_head, head, __ATOMIC_RELEASE);
}

}  // namespace coldpress

#else

namespace coldpress {

struct Ring::Shared {};
Ring::Ring() { error_ = ENOSYS; }
Ring::~Ring() = default;
void Ring::add(int, uint8_t*, uint64_t, uint64_t, uint64_t, bool) {}
void Ring::enter(bool, const std::function<void(uint64_t, int32_t)>&) {}
void Ring::reap(const std::function<void(uint64_t, int32_t)>&) {}

}  // namespace coldpress

#endif
