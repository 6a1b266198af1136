// Persistent threads that help a caller with a range of independent tasks. Which thread does which task is not
// determined, so a task must not depend on it; several callers may use one pool at once.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace coldpress {

class Pool {
   public:
    // Helpers without a job spin for `patience` before they sleep.
    explicit Pool(std::chrono::microseconds patience) : patience_(patience) {}

    // A range of tasks that was started and not finished.
    struct Job;
    struct Deleter {
        void operator()(Job* job) const;
    };
    using Started = std::unique_ptr<Job, Deleter>;

    // Calls task(i) once for each i in [0, count), on this thread and up to threads - 1 others; returns when all are
    // done. Tasks must not throw.
    void run(int64_t count, int threads, const std::function<void(int64_t)>& task);

    // The same, and passes each task the index of its thread's next task, or `count`, so that it can prefetch for it.
    void run_in_sight(int64_t count, int threads, const std::function<void(int64_t task, int64_t next)>& task);

    // Starts up to `threads` other threads, which call task(i) once for each i in [0, count), lower ones first. Returns
    // at once; the caller must call `finish`.
    Started start(int64_t count, int threads, std::function<void(int64_t)> task);
    // Helps with tasks that no thread has begun; returns when all are done.
    void finish(Job& job);

   private:
    void run_jobs(int64_t count, int threads, bool in_sight, std::function<void(int64_t, int64_t)> task);
    Started start_jobs(int64_t count, int threads, bool in_sight, std::function<void(int64_t, int64_t)> task);
    void work();
    void sleep(std::unique_lock<std::mutex>& lock);
    void withdraw(Job& job);
    void wait(Job& job);

    const std::chrono::microseconds patience_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::deque<Job*> jobs_;
    std::atomic<int> num_jobs_{0};  // of jobs_, for helpers that spin
    int workers_ = 0, asleep_ = 0;
};

// The number of forks between the program's first process and this one; threads of a smaller number are not there.
int num_forks();

// Returns the number of threads for an amount of work, if waking a helper pays from `least` work on.
int threads_worth(int64_t work, int64_t least, int threads);

Pool& compute_pool();
Pool& read_pool();  // separate, because its threads sleep in system calls

// The default number of threads of a kernel; initially the number of processors that this process may run on.
int default_threads();
void set_default_threads(int threads);

}  // namespace coldpress
