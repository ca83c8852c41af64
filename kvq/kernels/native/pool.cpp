// The threads behind pool.h: one pool for the process, made as calls ask for threads. Compiled once, without any
// instruction-set flag.
//
// A job is open while its caller works on it. Free threads enter it, work until nothing is left, and leave; the
// caller, who finds nothing left, closes it and waits for those inside. So a thread that the scheduler keeps from
// running, which never entered, is not waited for; and one that shares its core leaves between two tasks before the
// scheduler takes it off, and enters again. Who waits spins for four times as long as waking a sleeping thread takes,
// measured when the pool is made, and then sleeps: beside busy processes a core that spins is one that the thread it
// waits for may need.

#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#if defined(__linux__)
#include <sys/resource.h>
#endif

namespace {

// A job's state is one number: its own number, how many threads entered and are inside, and whether others may.
constexpr uint64_t OPEN = 1, INSIDE = 2, ENTERED = 1 << 16;
constexpr int NUMBER_SHIFT = 32;
constexpr int MOST_THREADS = 1 << 14;
inline int inside(uint64_t state) { return (int)(state & 0xffff) >> 1; }
inline int entered(uint64_t state) { return (int)(state >> 16 & 0xffff); }
inline uint32_t number_of(uint64_t state) { return (uint32_t)(state >> NUMBER_SHIFT); }

constexpr int64_t LEAST_WAKE_NS = 10000, MOST_WAKE_NS = 40000;  // that are believed
constexpr int SPIN_WAKES = 4;             // as long as so many take who waits spins
constexpr int64_t PATIENCE_NS = 1000000;  // with a thread that does not wake
constexpr int WAKES = 5;                  // that are timed
constexpr int64_t LOOK_NS = 1000000;      // between two looks whether a thread lost its core
constexpr int64_t LOST_NS = 1000000;      // that it was without a core, to count
constexpr int64_t AGAIN_NS = 50000000;    // within which it loses it twice if it shares it
constexpr int64_t SHARES_NS = 100000000;  // that it then rests now and then
constexpr int64_t LEAST_STRETCH_NS = 1200000, MOST_STRETCH_NS = 3500000;  // schedulers give 1.4 to 4 ms at a time
constexpr int64_t REST_NS = 600000;

struct Pool {
    alignas(64) uint64_t state;
    // Of the open job; written while nobody is inside.
    void (*work)(const void*, int);
    const void* data;
    int others;      // threads beside the caller that it takes
    int caller_cpu;  // on which the caller ran when it opened the job; below 0: nobody knows
    alignas(64) int is_taken;  // by a caller
    int threads;               // beside callers
    int64_t spin_ns;
    alignas(64) int sleeping;
    int caller_sleeps;
    pthread_mutex_t mutex;
    pthread_cond_t job, end;
};

Pool pool = {0, nullptr, nullptr, 0, -1, 0, 0, SPIN_WAKES * MOST_WAKE_NS, 0, 0,
             PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER};

template <class T>
inline T seen(const T& x) {
    return __atomic_load_n(&x, __ATOMIC_SEQ_CST);
}

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

// True as soon as `holds()`, false if it does not within `ns`.
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

// The same without a limit: asleep after a while; true if it was. `counted` says to who signals `changed` that
// somebody sleeps.
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

// To be called after what they wait for was written.
inline void wake(int& counted, pthread_cond_t& changed) {
    if (!seen(counted)) return;
    pthread_mutex_lock(&pool.mutex);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&pool.mutex);
}

inline int current_cpu() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

// Whether the calling thread lost its core to others while it had work: between `begin` and looks at moments between
// which it did not sleep. Both cost a system call, looks once a while.
struct Watch {
    int64_t wall = 0, cpu = 0, times_off = 0;  // when it began, the thread's own time then, how often it was taken off

    void begin(int64_t now) {
#if defined(__linux__)
        rusage used = {};
        getrusage(RUSAGE_THREAD, &used);
        wall = now, cpu = ns_of(used.ru_utime) + ns_of(used.ru_stime), times_off = used.ru_nivcsw;
#endif
    }
    bool lost_core(int64_t now) {
        if (now - wall < LOOK_NS) return false;
        Watch before = *this;
        begin(now);
        return times_off > before.times_off && (wall - before.wall) - (cpu - before.cpu) > LOST_NS;
    }

private:
    static int64_t ns_of(const timeval& t) { return t.tv_sec * 1000000000LL + t.tv_usec * 1000; }
};

// When a thread that shares its core with others' work rests: the scheduler takes it off after some milliseconds, in
// the middle of a task that everybody then waits for as long. So it goes by itself before that, between two tasks, after
// it has worked for about as long as it was away before.
struct Stretch {
    Watch watch;
    int64_t began = 0, length = LEAST_STRETCH_NS;   // since when it works without a pause, and how long it may
    int64_t lost_at = -AGAIN_NS, shares_until = 0;  // when its core went, and until when others are taken to be on it
    bool leaves = false;                            // the job it is in, between two tasks

    bool is_over(int64_t now) {
        if (now >= shares_until) shares_until = 0;
        return shares_until && now - began > length;
    }
    void look(int64_t now) {
        if (!watch.lost_core(now)) return;
        if (now - lost_at < AGAIN_NS) shares_until = now + SHARES_NS;  // a single loss may be the system's own work
        lost_at = began = now;
    }
    void was_away_since(int64_t then) {
        began = now_ns();
        watch.begin(began);
        int64_t away = began - then;
        length = away < LEAST_STRETCH_NS ? LEAST_STRETCH_NS : away > MOST_STRETCH_NS ? MOST_STRETCH_NS : away;
    }
    void rest() {
        timespec moment = {0, REST_NS};
        int64_t since = now_ns();
        nanosleep(&moment, nullptr);
        was_away_since(since);
        if (began - since > REST_NS + LOST_NS) shares_until = began + SHARES_NS;  // somebody else was there
    }
};
thread_local Stretch* stretch = nullptr;  // of a thread of the pool

// Keep the calling thread off its caller's core, if it finds itself there: two that always have work would share it
// for as long as the scheduler counts a busy process on another core as much as both of them.
struct Elsewhere {
#if defined(__linux__)
    cpu_set_t allowed, chosen;
    bool has_chosen = false;

    void leave(int cpu) {
        cpu_set_t now;
        if (cpu < 0 || cpu != sched_getcpu() || sched_getaffinity(0, sizeof now, &now)) return;
        if (!has_chosen || !CPU_EQUAL(&now, &chosen)) allowed = now;  // somebody else's choice is the frame
        if (!CPU_ISSET(cpu, &allowed) || CPU_COUNT(&allowed) < 2) return;
        chosen = allowed;
        CPU_CLR(cpu, &chosen);
        has_chosen = !sched_setaffinity(0, sizeof chosen, &chosen);
    }
#else
    void leave(int) {}
#endif
};

// A thread of the pool.
struct Member {
    Stretch own;
    Elsewhere elsewhere;
    uint32_t last_job = 0;    // that it took part in
    int number = 0;           // its own there
    bool comes_back = false;  // it left because its stretch was over

    bool finds_work() const {
        uint64_t state = seen(pool.state);
        return (state & OPEN) && (number_of(state) != last_job || comes_back);
    }

    // Take part in the open job, if it has room.
    void take_part() {
        uint64_t state = seen(pool.state);
        while (state & OPEN) {
            bool again = number_of(state) == last_job;
            if (again ? !comes_back : entered(state) >= seen(pool.others)) break;
            uint64_t next = state + INSIDE + (again ? 0 : ENTERED);
            if (!__atomic_compare_exchange_n(&pool.state, &state, next, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
                continue;
            if (!again) number = entered(next);
            elsewhere.leave(pool.caller_cpu);
            pool.work(pool.data, number);
            state = __atomic_sub_fetch(&pool.state, INSIDE, __ATOMIC_SEQ_CST);
            if (!(state & OPEN) && !inside(state)) wake(pool.caller_sleeps, pool.end);
            last_job = number_of(next), comes_back = own.leaves, own.leaves = false;
            own.look(now_ns());
            return;
        }
        last_job = number_of(state), comes_back = false;
    }
};

void* serve(void*) {
    Member member;
    stretch = &member.own;
    member.own.was_away_since(now_ns());
    for (;;) {
        int64_t since = now_ns();
        if (wait_for(pool.sleeping, pool.job, [&] { return member.finds_work(); })) member.own.was_away_since(since);
        member.take_part();
        if (member.own.is_over(now_ns())) member.own.rest();
    }
    return nullptr;
}

// A job for `others` threads, from its opening until the last has left it.
inline void run_job(int others, void (*work)(const void*, int), const void* data) {
    pool.work = work, pool.data = data, pool.caller_cpu = current_cpu();
    __atomic_store_n(&pool.others, others, __ATOMIC_RELAXED);
    uint32_t number = number_of(seen(pool.state)) + 1;
    __atomic_store_n(&pool.state, (uint64_t)(number ? number : 1) << NUMBER_SHIFT | OPEN, __ATOMIC_SEQ_CST);
    wake(pool.sleeping, pool.job);
    work(data, 0);
    __atomic_and_fetch(&pool.state, ~OPEN, __ATOMIC_SEQ_CST);
    wait_for(pool.caller_sleeps, pool.end, [] { return !inside(seen(pool.state)); });
}

// How long it takes to wake a thread that sleeps, at best: what spinning may cost.
inline int64_t wake_ns() {
    int64_t best = PATIENCE_NS;
    for (int i = 0; i < WAKES; i++) {
        timespec moment = {0, 100000};
        for (int patience = 0; !seen(pool.sleeping) && patience < 20; patience++) nanosleep(&moment, nullptr);
        int64_t began = now_ns(), took = PATIENCE_NS;
        auto until_entered = [](const void* data, int thread) {
            if (thread == 0 && spin(PATIENCE_NS, [] { return entered(seen(pool.state)) > 0; }))
                *(int64_t*)data = now_ns();
        };
        int64_t entered_ns = 0;
        run_job(1, until_entered, &entered_ns);
        if (entered_ns) took = entered_ns - began;
        if (took < best) best = took;
    }
    return best;
}

void forget_threads() {  // a forked process has none
    pool.state = 0, pool.is_taken = 0, pool.threads = 0, pool.sleeping = 0, pool.caller_sleeps = 0;
    pool.mutex = PTHREAD_MUTEX_INITIALIZER;
    pool.job = pool.end = PTHREAD_COND_INITIALIZER;
}

// Make threads until there are so many, or the system has no more. They leave signals to others.
inline void add_threads(int count) {
    if (pool.threads >= count) return;
    bool is_first = pool.threads == 0;
    static bool is_told = false;
    if (!is_told) pthread_atfork(nullptr, nullptr, forget_threads);
    is_told = true;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; pool.threads < count; pool.threads++) {
        if (pthread_create(&thread, nullptr, serve, nullptr)) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!is_first || !pool.threads) return;
    int64_t ns = wake_ns();
    ns = ns < LEAST_WAKE_NS ? LEAST_WAKE_NS : ns > MOST_WAKE_NS ? MOST_WAKE_NS : ns;
    __atomic_store_n(&pool.spin_ns, SPIN_WAKES * ns, __ATOMIC_RELAXED);  // threads read it already
}

}  // namespace

extern "C" int kvq_has_to_rest() {
    if (!stretch || !stretch->shares_until) return 0;
    return stretch->leaves = stretch->is_over(now_ns());
}

extern "C" void kvq_on_threads(int threads, void (*work)(const void* data, int thread), const void* data) {
    // Beside another caller's job there are no cores to be had.
    if (threads <= 1 || __atomic_exchange_n(&pool.is_taken, 1, __ATOMIC_ACQUIRE)) return work(data, 0);
    add_threads((threads < MOST_THREADS ? threads : MOST_THREADS) - 1);
    run_job(threads - 1, work, data);
    __atomic_store_n(&pool.is_taken, 0, __ATOMIC_RELEASE);
}
