// Put before the C library (LD_PRELOAD): what reads of one file meet, as a page of memory shared with the benchmark says.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OFF, PASSING, LASTING_ERROR, FLIPPED_BIT };
enum { SHORT, INTERRUPTED, ERROR, SLOW, KINDS };

struct Control {
    _Atomic int64_t mode;
    _Atomic int64_t device, inode;  // of the file
    _Atomic int64_t every[KINDS];   // one in so many reads meets this
    _Atomic int64_t slow_us;
    _Atomic int64_t reads;
    _Atomic int64_t met[KINDS];
};

static struct Control* control;
static ssize_t (*real_pread)(int, void*, size_t, off_t);

__attribute__((constructor)) static void begin(void) {
    real_pread = (ssize_t(*)(int, void*, size_t, off_t))dlsym(RTLD_NEXT, "pread64");
    const char* path = getenv("FAULTY_READS");
    if (!path) return;
    const int fd = open(path, O_RDWR);
    void* page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (page != MAP_FAILED) control = page;
}

static int meets(int kind, int64_t number) {
    const int64_t every = control->every[kind];
    if (!every || number % every != every / 2 + kind) return 0;
    ++control->met[kind];
    return 1;
}

static ssize_t faulty(int fd, void* into, size_t length, off_t offset) {
    struct stat file;
    if (!control || control->mode == OFF || fstat(fd, &file) || (int64_t)file.st_ino != control->inode ||
        (int64_t)file.st_dev != control->device)
        return real_pread(fd, into, length, offset);
    const int64_t number = ++control->reads;
    if (control->mode == LASTING_ERROR) {
        errno = EIO;
        return -1;
    }
    if (control->mode == FLIPPED_BIT) {
        const ssize_t got = real_pread(fd, into, length, offset);
        if (got > 0) ((uint8_t*)into)[got / 2] ^= 1;
        return got;
    }
    if (meets(INTERRUPTED, number)) {
        errno = EINTR;
        return -1;
    }
    if (meets(ERROR, number)) {
        errno = EIO;
        return -1;
    }
    if (meets(SLOW, number)) {
        const struct timespec time = {control->slow_us / 1000000, control->slow_us % 1000000 * 1000};
        nanosleep(&time, NULL);
    }
    if (length >= 8192 && meets(SHORT, number)) length = length / 2 / 4096 * 4096;
    return real_pread(fd, into, length, offset);
}

ssize_t pread(int fd, void* into, size_t length, off_t offset) { return faulty(fd, into, length, offset); }
ssize_t pread64(int fd, void* into, size_t length, off64_t offset) { return faulty(fd, into, length, offset); }
