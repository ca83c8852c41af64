// The few entry points of GCC's OpenMP runtime that the kernels call, on plain threads, for ThreadSanitizer:
// it sees how these wait for one another, which it can't inside the real runtime.

#include <pthread.h>
#include <stdlib.h>

#include <atomic>

namespace {

constexpr int MOST_LOOPS = 8, MOST_THREADS = 64;

struct Region {
    std::atomic<long> taken[MOST_LOOPS];  // chunks of each loop
    pthread_barrier_t barrier;
    int threads;
};

struct Member {
    Region* region;
    void (*run)(void*);
    void* data;
    int number;
};

thread_local Region* region = nullptr;
thread_local int number = 0, loop = 0;

void* run_member(void* memory) {
    Member* member = (Member*)memory;
    region = member->region, number = member->number, loop = 0;
    member->run(member->data);
    region = nullptr, number = 0;
    return nullptr;
}

bool take(long start, long end, long step, long chunk, long* from, long* to) {
    long at = start + region->taken[loop].fetch_add(1) * step * chunk;
    if (at >= end) return false;
    *from = at;
    *to = at + step * chunk < end ? at + step * chunk : end;
    return true;
}

struct Bounds {
    long start, end, step, chunk;
};

thread_local Bounds bounds;

}  // namespace

#define HIDDEN extern "C" __attribute__((visibility("hidden")))

HIDDEN void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned) {
    if (threads == 0 || threads > MOST_THREADS) abort();
    Region own = {};
    own.threads = (int)threads;
    pthread_barrier_init(&own.barrier, nullptr, threads);
    Member members[MOST_THREADS];
    pthread_t handles[MOST_THREADS];
    for (unsigned i = 0; i < threads; i++) members[i] = {&own, run, data, (int)i};
    for (unsigned i = 1; i < threads; i++)
        if (pthread_create(&handles[i], nullptr, run_member, &members[i])) abort();
    run_member(&members[0]);
    for (unsigned i = 1; i < threads; i++) pthread_join(handles[i], nullptr);
    pthread_barrier_destroy(&own.barrier);
}

HIDDEN bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long* from, long* to) {
    bounds = {start, end, step, chunk};
    return take(start, end, step, chunk, from, to);
}

HIDDEN bool GOMP_loop_nonmonotonic_dynamic_next(long* from, long* to) {
    return take(bounds.start, bounds.end, bounds.step, bounds.chunk, from, to);
}

HIDDEN void GOMP_loop_end() {
    if (++loop >= MOST_LOOPS) abort();
    pthread_barrier_wait(&region->barrier);
}

HIDDEN int omp_get_thread_num() { return number; }

HIDDEN int omp_get_num_threads() { return region ? region->threads : 1; }
