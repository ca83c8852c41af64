// Work for several threads: small tasks that whoever is there takes from a shared counter. Nobody waits for a thread
// that has no core, unless it lost it in the middle of a task. Results depend on no number of threads: tasks are cut
// by what they compute, never by who computes.
#pragma once

#include <stdint.h>

// work(data, thread) on the calling thread, as thread 0, and on up to `threads` - 1 others that are free, or twice that
// many where all cores are shared with other processes, each with a number below `most_threads` of its own; returns
// when all that began have ended. A thread that rests ends early; work may begin again under its number, that of thread
// 0 in another thread. Defined in pool.cpp, once for all variants.
extern "C" void kvq_on_threads(int threads, void (*work)(const void* data, int thread), const void* data);

// body(data), which has jobs done one after the other. Before the calling thread would lose its core, between two tasks,
// another may go on with it, jobs and what lies between them, and end it; threads' own variables are then another's.
extern "C" void kvq_carry_on(int threads, void (*body)(const void* data), const void* data);

// The same, but the calling thread goes away meanwhile and the pool's threads begin. Returns the body's number, with
// which it has to come back, once; 0 if the body has ended already, there being no threads for it.
extern "C" int64_t kvq_set_off(int threads, void (*body)(const void* data), const void* data);

// Help that body until it has ended.
extern "C" void kvq_see_through(int64_t number);

// How often another thread went on so, since the process began.
extern "C" int64_t kvq_times_carried();

// True if the calling thread, which has number `thread` in a job, should leave it between two tasks.
extern "C" int kvq_has_to_rest(int thread);

namespace {

inline int64_t most_threads(int threads) { return 2 * (int64_t)threads - 1; }

// Tasks that threads take, `chunk` neighbouring ones at a time.
struct Tasks {
    alignas(64) int64_t next;
    alignas(64) int64_t count;
    int64_t chunk;

    // False when none is left for this thread.
    bool take(int thread, int64_t& first, int64_t& last) {
        if (kvq_has_to_rest(thread)) return false;
        first = __atomic_fetch_add(&next, chunk, __ATOMIC_RELAXED);
        last = first + chunk < count ? first + chunk : count;
        return first < count;
    }
};

// work(thread, tasks) on every thread that comes, until none is left for it; it may come again, under its number.
template <class Work>
inline void share_tasks(int threads, int64_t count, int64_t chunk, const Work& work) {
    // D102: nobody waits for a thread that did not come
    struct Shared {
        Tasks tasks;
        const Work& work;
    } shared = {{0, count, chunk}, work};
    int64_t most = (count + chunk - 1) / chunk;
    auto run = [](const void* data, int thread) {
        Shared& s = *(Shared*)data;
        s.work(thread, s.tasks);
    };
    if (count > 0) kvq_on_threads(threads < most ? threads : (int)most, run, &shared);
}

// work(thread, task) for every task.
template <class Work>
inline void run_tasks(int threads, int64_t count, int64_t chunk, const Work& work) {
    share_tasks(threads, count, chunk, [&](int thread, Tasks& tasks) {
        for (int64_t first, last; tasks.take(thread, first, last);)
            for (int64_t i = first; i < last; i++) work(thread, i);
    });
}

// work(task) for tasks of equal work that are too small to be taken one by one.
template <class Work>
inline void run_even(int threads, int64_t count, const Work& work) {
    int64_t chunk = count / (4 * (int64_t)(threads < 1 ? 1 : threads));
    run_tasks(threads, count, chunk < 1 ? 1 : chunk, [&](int, int64_t i) { work(i); });
}

// body(), as kvq_carry_on says; returns what it returns.
template <class Body>
inline int carry_on(int threads, const Body& body) {
    struct Run {
        const Body& body;
        int status;
    } run = {body, 0};
    kvq_carry_on(threads, [](const void* data) { ((Run*)data)->status = ((const Run*)data)->body(); }, &run);
    return run.status;
}

}  // namespace
