// Work for several threads: small tasks that any free thread takes from a shared counter. No thread waits for one that
// has no core, unless it lost the core in the middle of a task. Results don't depend on the number of threads: tasks
// are split by their content, never by thread.
#pragma once

#include <stdint.h>

// Run work(data, thread) on the calling thread, as thread 0, and on up to `threads` - 1 other free threads, or twice
// that many if all cores are shared with other processes; each has its own number below `most_threads`. Return when all
// that began have ended. A thread that rests ends early; work may begin again with its number, with number 0 in another
// thread. Defined in pool.cpp, once for all variants.
extern "C" void kvq_on_threads(int threads, void (*work)(const void* data, int thread), const void* data);

// Run body(data), which runs jobs one after the other. Before the calling thread would lose its core, between two
// tasks, another thread may continue the body and end it; thread-local variables are then those of that thread.
extern "C" void kvq_carry_on(int threads, void (*body)(const void* data), const void* data);

// The same, but the calling thread leaves meanwhile and the pool's threads begin. Return the body's number, with which
// the caller must come back, once; 0 if the body has already ended, because there were no threads for it.
extern "C" int64_t kvq_set_off(int threads, void (*body)(const void* data), const void* data);

// Help with the body of that number until it has ended.
extern "C" void kvq_see_through(int64_t number);

// Return how often another thread has continued a body since the process began.
extern "C" int64_t kvq_times_carried();

// True if the calling thread, which has number `thread` in a job, should leave it between two tasks.
extern "C" int kvq_has_to_rest(int thread);

namespace {

inline int64_t most_threads(int threads) { return 2 * (int64_t)threads - 1; }

// Tasks that threads take, `chunk` adjacent ones at a time.
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

// Run work(thread, tasks) on every thread that joins, until no task is left for it; it may join again, with its number.
template <class Work>
inline void share_tasks(int threads, int64_t count, int64_t chunk, const Work& work) {
    // D102: nobody waits for a thread that did not join
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

// Run work(thread, task) for every task.
template <class Work>
inline void run_tasks(int threads, int64_t count, int64_t chunk, const Work& work) {
    share_tasks(threads, count, chunk, [&](int thread, Tasks& tasks) {
        for (int64_t first, last; tasks.take(thread, first, last);)
            for (int64_t i = first; i < last; i++) work(thread, i);
    });
}

// Run work(task) for tasks of equal work that are too small to be taken one by one.
template <class Work>
inline void run_even(int threads, int64_t count, const Work& work) {
    int64_t chunk = count / (4 * (int64_t)(threads < 1 ? 1 : threads));
    run_tasks(threads, count, chunk < 1 ? 1 : chunk, [&](int, int64_t i) { work(i); });
}

// Run body() through kvq_carry_on; return its result.
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
