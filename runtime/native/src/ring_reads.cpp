#include "ring_reads.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <thread>

#include "ring.h"

namespace coldpress {

class RingEngine {
   public:
    RingEngine() {
        if (ring_.error() == 0) std::thread(&RingEngine::work, this).detach();
    }
    int error() const { return ring_.error(); }
    void start(RingReads* reads, int depth) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            waiting_.push_back({reads, 0, std::min(depth, static_cast<int>(Ring::kEntries))});
        }
        wake_.notify_one();
    }

   private:
    struct Waiting {
        RingReads* reads;
        int64_t next;  // the first piece that is not in flight yet
        int depth;
    };
    struct Flight {
        RingReads* reads;
        int64_t index;
        uint64_t got;
        int error;
    };

    void work();
    void begin();
    void read_rest(size_t place, bool async);
    void ended(size_t place, int32_t result);

    Ring ring_;
    std::vector<Flight> flights_ = std::vector<Flight>(Ring::kEntries);
    std::vector<size_t> free_ = all_places();
    std::vector<Flight> arrived_;  // read, and not checked yet

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<Waiting> waiting_;

    static std::vector<size_t> all_places() {
        std::vector<size_t> places(Ring::kEntries);
        for (size_t i = 0; i < places.size(); ++i) places[i] = i;
        return places;
    }
    int in_flight() const { return static_cast<int>(flights_.size() - free_.size()); }
};

void RingEngine::work() {
    sigset_t all;  // block all signals here: the program's threads handle them
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    for (;;) {
        begin();
        // The device works on the reads submitted here while this thread checks those that have arrived.
        const auto ended = [this](uint64_t place, int32_t result) { this->ended(static_cast<size_t>(place), result); };
        ring_.enter(arrived_.empty() && in_flight(), ended);
        for (const Flight& flight : arrived_) flight.reads->arrived(flight.index, flight.got, flight.error);
        arrived_.clear();
        ring_.reap(ended);
    }
}

// Adds reads until the allowed number is in flight; sleeps while there is nothing to do.
void RingEngine::begin() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (arrived_.empty() && in_flight() == 0) wake_.wait(lock, [this] { return !waiting_.empty(); });
    while (!waiting_.empty() && in_flight() < waiting_.front().depth) {
        Waiting& first = waiting_.front();
        const size_t place = free_.back();
        free_.pop_back();
        flights_[place] = {first.reads, first.next, 0, 0};
        if (++first.next == static_cast<int64_t>(first.reads->pieces_.size())) waiting_.pop_front();
        read_rest(place, false);
    }
}

void RingEngine::read_rest(size_t place, bool async) {
    const Flight& flight = flights_[place];
    const auto& piece = flight.reads->pieces_[static_cast<size_t>(flight.index)];
    ring_.add(flight.reads->fd_, flight.reads->buffer_ + piece.buffer_offset + flight.got, piece.length - flight.got,
              piece.offset + flight.got, place, async);
}

void RingEngine::ended(size_t place, int32_t result) {
    Flight& flight = flights_[place];
    const uint64_t length = flight.reads->pieces_[static_cast<size_t>(flight.index)].length;
    if (result > 0) {
        flight.got += static_cast<uint64_t>(result);
        if (flight.got < length) return read_rest(place, false);
    } else if (result == -EINTR || result == -EAGAIN) {
        return read_rest(place, result == -EAGAIN);
    } else if (result < 0 && !(flight.got && result == -EINVAL)) {
        flight.error = -result;  // O_DIRECT refuses the offset after a partial read: the file ended
    }
    arrived_.push_back(flight);
    free_.push_back(place);
}

namespace {

// Never destroyed, like the pools. A forked child cannot use it, because the child does not have its thread.
RingEngine* engine = nullptr;
std::mutex engine_mutex;
bool watched = false;

RingEngine& ring_engine() {
    const std::lock_guard<std::mutex> lock(engine_mutex);
    if (!engine) engine = new RingEngine;
    if (!watched) pthread_atfork([] { engine_mutex.lock(); }, [] { engine_mutex.unlock(); },
                                 [] { engine = nullptr; engine_mutex.unlock(); });
    watched = true;
    return *engine;
}

}  // namespace

int ring_error() { return ring_engine().error(); }

RingReads::RingReads(const Request& request, int depth) : Reads(request) {
    if (!pieces_.empty()) ring_engine().start(this, depth);
}

RingReads::~RingReads() { finish(); }

}  // namespace coldpress
