// State that the pool's threads and its callers share, and how they wait for each other; see pool.cpp.
#pragma once

#include <pthread.h>
#include <stdint.h>

#include "stretch.h"

namespace {

// A job's state in one number: its own number, how many threads entered and are inside, and whether others may enter.
constexpr uint64_t OPEN = 1, INSIDE = 2, ENTERED = 1 << 16;
constexpr int NUMBER_SHIFT = 32;
constexpr int MOST_THREADS = 1 << 14;
inline int inside(uint64_t state) { return (int)(state & 0xffff) >> 1; }
inline int entered(uint64_t state) { return (int)(state >> 16 & 0xffff); }
inline uint32_t number_of(uint64_t state) { return (uint32_t)(state >> NUMBER_SHIFT); }

constexpr int64_t LEAST_WAKE_NS = 10000, MOST_WAKE_NS = 40000;  // limits for the measured time
// D104: spin four wakes, then sleep
constexpr int SPIN_WAKES = 4;             // a waiting thread spins for as long as these take
constexpr int64_t PATIENCE_NS = 1000000;  // with a thread that does not wake
constexpr int WAKES = 5;                  // that are timed

struct Pool {
    alignas(64) uint64_t state;
    // Of the open job; written while nobody is inside.
    void (*work)(const void*, int);
    const void* data;
    int usual;       // threads that it takes, without the caller,
    int others;      // and with spare ones
    int caller_cpu;  // on which the caller ran when it opened the job; negative: unknown
    alignas(64) int is_taken;  // by a caller
    int threads;               // without callers
    int sharing;               // of these, threads that share their cores with other work
    int spares;                // more threads, which sleep except
    int spares_work;           // while all others, a caller with them, share their cores
    int64_t spin_ns;
    alignas(64) int sleeping;
    int caller_sleeps;
    pthread_mutex_t mutex;
    pthread_cond_t job, end, need;
};

Pool pool = {0, nullptr, nullptr, 0, 0, -1, 0, 0, 0, 0, 0, SPIN_WAKES * MOST_WAKE_NS, 0, 0,
             PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER};

template <class T>
inline T seen(const T& x) {
    return __atomic_load_n(&x, __ATOMIC_SEQ_CST);
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

// Return true as soon as `holds()`, false if that takes longer than `ns`.
template <class Condition>
inline bool spin(int64_t ns, Condition holds) {
    for (int i = 0; i < 64; i++, relax())
        if (holds()) return true;
    int64_t end = now_ns() + ns;
    do {
        for (int i = 0; i < 32; i++, relax())
            if (holds()) return true;
    } while (now_ns() < end);
    return false;
}

// The same without a limit, sleeping after a while; return true if it slept. `counted` tells the thread that signals
// `changed` that one sleeps.
template <class Condition>
inline bool wait_for(int& counted, pthread_cond_t& changed, Condition holds) {
    if (spin(seen(pool.spin_ns), holds)) return false;
    pthread_mutex_lock(&pool.mutex);
    __atomic_fetch_add(&counted, 1, __ATOMIC_SEQ_CST);
    while (!holds()) pthread_cond_wait(&changed, &pool.mutex);
    __atomic_fetch_sub(&counted, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool.mutex);
    return true;
}

// Must be called after the state that they wait for was written.
inline void wake(int& counted, pthread_cond_t& changed) {
    if (!seen(counted)) return;
    pthread_mutex_lock(&pool.mutex);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&pool.mutex);
}

}  // namespace
