// Persistent threads that help a caller with a range of independent tasks. Which thread does which task is not
// determined, so a task must not depend on it; several callers may use one pool at once.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace coldpress {

class Pool {
   public:
    // What was started and not finished.
    struct Job;
    struct Deleter {
        void operator()(Job* job) const;
    };
    using Started = std::unique_ptr<Job, Deleter>;

    // Calls task(i) once for each i in [0, count), on this thread and up to threads - 1 others; returns when all are
    // done. Tasks must not throw.
    void run(int64_t count, int threads, const std::function<void(int64_t)>& task);

    // The same, and tells each task which one its thread does next, or `count`, so that it can have its memory fetched.
    void run_in_sight(int64_t count, int threads, const std::function<void(int64_t task, int64_t next)>& task);

    // Has up to `threads` other threads call task(i) once for each i in [0, count), lower ones first, and returns at
    // once; `finish` must follow.
    Started start(int64_t count, int threads, std::function<void(int64_t)> task);
    // Helps with what nobody has begun; returns when all is done.
    void finish(Job& job);

   private:
    void run_jobs(int64_t count, int threads, bool in_sight, std::function<void(int64_t, int64_t)> task);
    Started start_jobs(int64_t count, int threads, bool in_sight, std::function<void(int64_t, int64_t)> task);
    void work();
    void withdraw(Job& job);
    void wait(Job& job);

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::deque<Job*> jobs_;
    int workers_ = 0;
};

// How many threads to use for so much work, where a helper is worth waking for `least` of it.
int threads_worth(int64_t work, int64_t least, int threads);

Pool& compute_pool();
Pool& read_pool();  // apart from the other: its threads sleep in the device

// Threads of a kernel that is not told otherwise; at first the processors that this process may run on.
int default_threads();
void set_default_threads(int threads);

}  // namespace coldpress
