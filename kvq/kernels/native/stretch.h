// The time after which a thread that shares its core with other work leaves, before it is preempted.
#pragma once

#include <stdint.h>
#include <time.h>

#if defined(__linux__)
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t LOOK_NS = 1000000;       // between two samples, 8 us each, of how long a thread waited for its core
constexpr int64_t LONG_LOOK_NS = 4000000;  // if it seems to have its core for itself
constexpr int64_t LOST_NS = 1000000;       // of waiting at a time: others used the core
constexpr int64_t SPAN_NS = 40000000;      // with work, over which waiting is added up,
constexpr int64_t MEMORY_NS = 160000000;   // and for which it counts
constexpr double SHARES = 0.3;             // least waiting share of a thread whose core counts as shared
constexpr int64_t LEAST_STRETCH_NS = 1200000, MOST_STRETCH_NS = 3500000;  // schedulers give 1.4 to 4 ms at a time
constexpr int64_t REST_NS = 600000;

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Times of a thread, ns: on a core, and ready to run without one.
struct Had {
    int64_t ran = 0, waited = 0;
};

// Times of the calling thread, as the system counts them; zeros if it does not. The file is not kept open, because
// after a fork it would be another thread's.
inline Had had_so_far() {
    Had had;
#if defined(__linux__)
    int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return had;
    char text[64], *rest;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return had;
    text[length] = 0;
    had.ran = strtoll(text, &rest, 10), had.waited = strtoll(rest, nullptr, 10);
#endif
    return had;
}

// When a thread that shares its core with other work rests: the scheduler would preempt it after some milliseconds, in
// the middle of a task for which all others then wait. It therefore leaves before that, between two tasks, after it has
// worked for about as long as it was away before.
// D108: rest before the scheduler takes the core
class Stretch {
public:
    // D107: only schedstat distinguishes waiting from sleeping
    bool shares_core() const { return part_waited_ > SHARES; }
    bool is_over(int64_t now) const { return shares_core() && now - began_ > length_; }

    // Update from the calling thread's times since its last sample.
    void look(int64_t now) {
        Had before = had_;
        looked_ = now, had_ = had_so_far();
        if (had_.waited - before.waited > LOST_NS) began_ = now;
        int64_t waited = had_.waited - at_span_.waited, span = had_.ran - at_span_.ran + waited;
        if (span < SPAN_NS) return;
        part_waited_ += ((double)waited / (double)span - part_waited_) * (span < MEMORY_NS ? (double)span / MEMORY_NS : 1);
        at_span_ = had_;
    }
    void look_once_a_while(int64_t now) {
        if (now - looked_ >= (shares_core() ? LOOK_NS : LONG_LOOK_NS)) look(now);
    }
    // It slept since then.
    void begin_after(int64_t then) {
        began_ = now_ns();
        int64_t away = began_ - then;
        length_ = away < LEAST_STRETCH_NS ? LEAST_STRETCH_NS : away > MOST_STRETCH_NS ? MOST_STRETCH_NS : away;
    }
    void rest() {
        timespec moment = {0, REST_NS};
        int64_t since = now_ns();
        nanosleep(&moment, nullptr);
        begin_after(since);
    }

private:
    int64_t began_ = 0, length_ = LEAST_STRETCH_NS;  // start of its work, as far as it knows, and the time it may work
    int64_t looked_ = 0;
    Had had_, at_span_;       // at the last sample, and at the start of the sum
    double part_waited_ = 0;  // of the last time with work
};

}  // namespace
