#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace coldpress {
namespace {

// A thread that has nothing to do spins for so long before it sleeps. Waking a sleeping one takes 50 to 100 us where its
// processor has gone idle, as long as a small matrix takes; between two products of a token there is rarely more.
constexpr std::chrono::microseconds kCallerPatience{50}, kHelperPatience{200}, kReaderPatience{0};

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Calls `idle` until there is a reason not to, or patience ends.
template <typename Done, typename Idle>
void spin(std::chrono::microseconds patience, const Done& done, const Idle& idle) {
    const auto until = std::chrono::steady_clock::now() + patience;
    while (!done() && std::chrono::steady_clock::now() < until) idle();
}

}  // namespace

struct Pool::Job {
    std::function<void(int64_t, int64_t)> task;
    int64_t count;
    bool in_sight;  // whether a thread takes its next task before it runs the current one, so as to prefetch for it
    std::atomic<int64_t> next{0};
    int wanted;                  // helpers that have not joined yet
    std::atomic<int> active{0};  // helpers at work

    void help() {
        for (int64_t i = take(); i < count;) {
            const int64_t after = in_sight ? take() : count;
            task(i, after);
            i = in_sight ? after : take();
        }
    }

    int64_t take() { return next.fetch_add(1, std::memory_order_relaxed); }
};

void Pool::run(int64_t count, int threads, const std::function<void(int64_t)>& task) {
    run_jobs(count, threads, false, [&task](int64_t i, int64_t) { task(i); });
}

void Pool::run_in_sight(int64_t count, int threads, const std::function<void(int64_t, int64_t)>& task) {
    run_jobs(count, threads, true, [&task](int64_t i, int64_t next) { task(i, next); });
}

void Pool::run_jobs(int64_t count, int threads, bool in_sight, std::function<void(int64_t, int64_t)> task) {
    const int helpers = static_cast<int>(std::min<int64_t>(threads, count)) - 1;
    if (helpers <= 0) {
        for (int64_t i = 0; i < count; ++i) task(i, i + 1);
        return;
    }
    const Started job = start_jobs(count, helpers, in_sight, std::move(task));
    job->help();
    withdraw(*job);
    // Helpers usually finish their last task sooner than this thread could fall asleep and be woken, so it spins first
    // and sleeps only if they take longer.
    spin(kCallerPatience, [&] { return job->active.load(std::memory_order_acquire) == 0; }, pause);
    wait(*job);
}

Pool::Started Pool::start(int64_t count, int threads, std::function<void(int64_t)> task) {
    return start_jobs(count, threads, false, [task = std::move(task)](int64_t i, int64_t) { task(i); });
}

Pool::Started Pool::start_jobs(int64_t count, int threads, bool in_sight, std::function<void(int64_t, int64_t)> task) {
    const int helpers = static_cast<int>(std::min<int64_t>(threads, count));
    Started job(new Job);
    job->task = std::move(task);
    job->count = count;
    job->in_sight = in_sight;
    job->wanted = helpers;
    if (helpers <= 0) return job;
    int woken = 0;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (; workers_ < helpers; ++workers_) std::thread(&Pool::work, this).detach();
        jobs_.push_back(job.get());
        num_jobs_.store(static_cast<int>(jobs_.size()), std::memory_order_release);
        woken = std::min(helpers, asleep_);
    }
    for (int i = 0; i < woken; ++i) wake_.notify_one();
    return job;
}

void Pool::Deleter::operator()(Job* job) const { delete job; }

void Pool::finish(Job& job) {
    job.help();
    withdraw(job);
    wait(job);
}

// Closes the job to further helpers.
void Pool::withdraw(Job& job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto waiting = std::find(jobs_.begin(), jobs_.end(), &job);
    if (waiting != jobs_.end()) jobs_.erase(waiting);
    num_jobs_.store(static_cast<int>(jobs_.size()), std::memory_order_release);
}

// Waits until no helper is at work. Takes the lock even if none is, because the last helper may still hold it.
void Pool::wait(Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&job] { return job.active == 0; });
}

int threads_worth(int64_t work, int64_t least, int threads) {
    return static_cast<int>(std::clamp<int64_t>(work / least, 1, threads));
}

void Pool::work() {
    sigset_t all;  // block all signals here: the program's threads handle them
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        if (jobs_.empty()) sleep(lock);
        Job& job = *jobs_.front();
        if (--job.wanted == 0) jobs_.pop_front();
        num_jobs_.store(static_cast<int>(jobs_.size()), std::memory_order_release);
        ++job.active;
        lock.unlock();
        job.help();
        lock.lock();
        if (--job.active == 0) done_.notify_all();
    }
}

// Returns when there is a job.
void Pool::sleep(std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    // yields to other threads, such as those that check the pages just read
    spin(patience_, [this] { return num_jobs_.load(std::memory_order_acquire) != 0; }, std::this_thread::yield);
    lock.lock();
    ++asleep_;
    wake_.wait(lock, [this] { return !jobs_.empty(); });
    --asleep_;
}

namespace {

// Pools are never destroyed, because their threads may be asleep when the process ends. A forked child has no threads
// of its parent, so it starts with new pools.
struct Pools {
    Pool* compute = new Pool(kHelperPatience);
    Pool* read = new Pool(kReaderPatience);
    int forks = 0;
    Pools();
};
Pools pools;

Pools::Pools() {
    pthread_atfork(nullptr, nullptr, [] {
        pools.compute = new Pool(kHelperPatience);
        pools.read = new Pool(kReaderPatience);
        ++pools.forks;
    });
}

int processors() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
    return std::max(1u, std::thread::hardware_concurrency());
}

std::atomic<int> threads_in_use{processors()};

}  // namespace

Pool& compute_pool() { return *pools.compute; }
Pool& read_pool() { return *pools.read; }
int num_forks() { return pools.forks; }

int default_threads() { return threads_in_use; }
void set_default_threads(int threads) { threads_in_use = threads; }

}  // namespace coldpress
