// The least that reads from a device can cost: threads that take the next read of a list, and nothing else.
// bare_reads FILE BYTES DEPTH REPEATS < offsets (uint64, native order): prints seconds, one number per repeat.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static int file;
static size_t bytes, count;
static uint64_t *offsets;
static char *buffer;
static atomic_size_t next;

static void *reads(void *unused) {
    for (size_t i; (i = atomic_fetch_add(&next, 1)) < count;)
        if (pread(file, buffer + i * bytes, bytes, (off_t)offsets[i]) != (ssize_t)bytes) {
            perror("pread");
            exit(1);
        }
    return unused;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    bytes = strtoull(argv[2], NULL, 10);
    const size_t depth = strtoull(argv[3], NULL, 10), repeats = strtoull(argv[4], NULL, 10);
    file = open(argv[1], O_RDONLY | O_DIRECT);
    if (file < 0) return perror("open"), 1;
    offsets = malloc(sizeof *offsets << 20);
    count = fread(offsets, sizeof *offsets, 1 << 20, stdin);
    if (posix_memalign((void **)&buffer, 2 << 20, count * bytes)) return 1;
    madvise(buffer, count * bytes, MADV_HUGEPAGE);  // as ours
    for (size_t i = 0; i < count * bytes; i += 4096) buffer[i] = 1;  // pages that are there, as ours are after a warm-up
    pthread_t threads[256];
    for (size_t repeat = 0; repeat < repeats; ++repeat) {
        atomic_store(&next, 0);
        const double start = now();
        for (size_t i = 0; i < depth; ++i) pthread_create(&threads[i], NULL, reads, NULL);
        for (size_t i = 0; i < depth; ++i) pthread_join(threads[i], NULL);
        printf("%.9f\n", now() - start);
    }
    return 0;
}
