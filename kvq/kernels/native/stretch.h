// When a thread that shares its core with others' work goes before it is taken off.
#pragma once

#include <stdint.h>
#include <time.h>

#if defined(__linux__)
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t LOOK_NS = 1000000;      // between two looks at how long a thread waited for its core
constexpr int64_t LOST_NS = 1000000;      // of that in one go: others were there
constexpr int64_t SPAN_NS = 40000000;     // over which waiting is added up,
constexpr int64_t MEMORY_NS = 160000000;  // and that counts
constexpr double SHARES = 0.25;           // of its time a thread waits whose core is taken to be others', too
constexpr int64_t LEAST_STRETCH_NS = 1200000, MOST_STRETCH_NS = 3500000;  // schedulers give 1.4 to 4 ms at a time
constexpr int64_t REST_NS = 600000;

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// For how long the thread that asks first was ready to run and had no core, as the system counts it; 0 where it does not.
class Waited {
public:
    int64_t ns() {
#if defined(__linux__)
        if (file_ == UNKNOWN) file_ = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
        char text[64];
        ssize_t length = file_ < 0 ? -1 : pread(file_, text, sizeof text - 1, 0);
        if (length <= 0) return 0;
        text[length] = 0;
        const char* second = strchr(text, ' ');  // after the time it ran
        return second ? strtoll(second, nullptr, 10) : 0;
#else
        return 0;
#endif
    }
    // In a forked process the file is another's thread's.
    void forget() {
#if defined(__linux__)
        if (file_ >= 0) close(file_);
#endif
        file_ = UNKNOWN;
    }
    Waited() = default;
    Waited(const Waited&) = delete;
    ~Waited() { forget(); }

private:
    static constexpr int UNKNOWN = -2;
    int file_ = UNKNOWN;
};

// When a thread that shares its core with others' work rests: the scheduler takes it off after some milliseconds, in
// the middle of a task that everybody then waits for as long. So it goes by itself before that, between two tasks, after
// it has worked for about as long as it was away before.
class Stretch {
public:
    Waited waited;

    bool shares_core() const { return part_waited_ > SHARES; }
    bool is_over(int64_t now) const { return shares_core() && now - began_ > length_; }

    // How the calling thread fared since it looked last.
    void look(int64_t now) {
        int64_t before = waited_ns_;
        looked_ = now, waited_ns_ = waited.ns();
        if (waited_ns_ - before > LOST_NS) began_ = now;
        int64_t span = now - span_began_;
        if (span < SPAN_NS) return;
        double part = (double)(waited_ns_ - span_waited_ns_) / (double)span;
        part_waited_ += (part - part_waited_) * (span < MEMORY_NS ? (double)span / MEMORY_NS : 1);
        span_began_ = now, span_waited_ns_ = waited_ns_;
    }
    void look_once_a_while(int64_t now) {
        if (now - looked_ >= LOOK_NS) look(now);
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
    int64_t began_ = 0, length_ = LEAST_STRETCH_NS;  // since when it works without a pause, and how long it may
    int64_t looked_ = 0, waited_ns_ = 0;
    int64_t span_began_ = 0, span_waited_ns_ = 0;
    double part_waited_ = 0;  // of the last time
};

}  // namespace
