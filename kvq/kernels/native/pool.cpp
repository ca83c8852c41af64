// The threads behind pool.h: one pool for the process, made as calls ask for threads. Compiled once, without any
// instruction-set flag.
//
// A job is open while its caller works on it. Free threads enter it, work until no task is left, and leave; when the
// caller finds no task left, it closes the job and waits for the threads inside. It does not wait for a thread that
// the scheduler keeps from running, which never entered. A thread that shares its core leaves between two tasks, before
// the scheduler preempts it, and enters again. In a course, a call of many jobs, the caller does the same if as many of
// the pool's threads share their cores as a job takes: a thread with a core continues in its place, and as many spare
// threads, which otherwise sleep, take part. A waiting thread spins for four times the time it takes to wake a thread,
// measured when the pool is made, then sleeps: if other processes are busy, it may spin on a core that is needed.

#include "pool.h"

#include "elsewhere.h"
#include "fiber.h"
#include "pool_state.h"
#include "signals.h"

namespace {

// A call of jobs one after the other, with the code between them; threads continue it one after the other.
struct Course {
    alignas(64) int is_taken;  // by a caller
    int waits;                 // for a thread that continues
    int has_ended;
    int64_t number;         // of the body that is or was run
    int64_t unclaimed;      // the same, until its caller returns for it or, once it has ended, until the next call
    int64_t times_carried;  // that a thread other than its caller continued
    struct Member* caller;  // null while it is away
    Fiber fiber;
};
Course course = {};

// A thread that takes part: of the pool, or a course's caller.
struct Member {
    bool is_of_pool = false, is_spare = false;
    Stretch stretch;
    Elsewhere elsewhere;
    uint32_t last_job = 0;    // that it took part in
    int number = 0;           // its number there
    bool leaves = false;      // its job, between two tasks, because its stretch is over
    bool comes_back = false;  // it left the last job that way
    bool drives = false;      // it continues the course, and is thread 0 of its jobs
    bool is_counted = false;  // in pool.sharing

    bool may_enter(uint64_t state) const { return (state & OPEN) && (number_of(state) != last_job || comes_back); }
    bool finds_work() const { return may_enter(seen(pool.state)) || seen(course.waits); }

    // Take part in the open job; false if there is none with room.
    bool enters() {
        uint64_t state = seen(pool.state);
        while (may_enter(state)) {
            bool again = number_of(state) == last_job;
            if (!again && entered(state) >= seen(pool.others)) break;
            uint64_t next = state + INSIDE + (again ? 0 : ENTERED);
            if (!__atomic_compare_exchange_n(&pool.state, &state, next, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
                continue;
            if (!again) number = entered(next);
            if (is_of_pool) elsewhere.leave(pool.caller_cpu);
            pool.work(pool.data, number);
            state = __atomic_sub_fetch(&pool.state, INSIDE, __ATOMIC_SEQ_CST);
            if (!(state & OPEN) && !inside(state)) wake(pool.caller_sleeps, pool.end);
            last_job = number_of(next), comes_back = leaves, leaves = false;
            return true;
        }
        last_job = number_of(state), comes_back = false;
        return false;
    }

    // Continue the course until it ends, or this thread leaves it to another.
    void drive() {
        drives = true;
        if (this != seen(course.caller)) __atomic_fetch_add(&course.times_carried, 1, __ATOMIC_RELAXED);
        bool has_ended = course.fiber.resume(), somebody_waits = !has_ended || this != seen(course.caller);
        drives = leaves = false;
        __atomic_store_n(has_ended ? &course.has_ended : &course.waits, 1, __ATOMIC_SEQ_CST);
        if (somebody_waits) wake(pool.sleeping, pool.job);
    }

    void rest_if_over() {
        stretch.look_once_a_while(now_ns());
        if (stretch.is_over(now_ns())) stretch.rest();
    }

    // Wait for work and do it, until `is_over()`.
    template <class Condition>
    void work_until(Condition is_over) {
        while (!is_over()) {
            int64_t since = now_ns();
            if (wait_for(pool.sleeping, pool.job, [&] { return finds_work() || is_over(); }))
                stretch.begin_after(since);
            if (!enters() && __atomic_exchange_n(&course.waits, 0, __ATOMIC_SEQ_CST)) drive();
            rest_if_over();
            bool shares = is_of_pool && !is_spare && stretch.shares_core();
            if (shares != is_counted) __atomic_fetch_add(&pool.sharing, shares ? 1 : -1, __ATOMIC_SEQ_CST);
            is_counted = shares;
        }
    }
};

thread_local Member* own_member = nullptr;
thread_local Member calling_member;  // of a thread that calls courses: each course knows the last one's state

// A separate function: code that continues in another thread must not cache the first one's address.
__attribute__((noinline)) Member* this_member() {
    __asm__ volatile("" : : : "memory");
    return own_member;
}

// Name of the calling thread in a list of the process's threads.
inline void set_name(const char* name) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), name);
#endif
}

void* serve(void*) {
    set_name("kvq-pool");
    Member member;
    member.is_of_pool = true;
    own_member = &member;
    member.stretch.begin_after(now_ns());
    member.work_until([] { return false; });
    return nullptr;
}

// Name of threads that take part only if cores are shared: the more of a process's threads have work on a core, the
// more of the core the scheduler gives it.
void* serve_at_need(void*) {
    set_name("kvq-spare");
    Member member;
    member.is_of_pool = member.is_spare = true;
    own_member = &member;
    for (;;) {
        pthread_mutex_lock(&pool.mutex);
        while (!seen(pool.spares_work)) pthread_cond_wait(&pool.need, &pool.mutex);
        pthread_mutex_unlock(&pool.mutex);
        member.stretch.begin_after(now_ns());
        member.work_until([] { return !seen(pool.spares_work); });
    }
    return nullptr;
}

// A job's work as its thread 0, which in a course may be one thread after the other.
inline void do_work(void (*work)(const void*, int), const void* data) {
    for (;;) {
        work(data, 0);
        Member* member = this_member();
        if (!member || !member->drives) return;
        if (!member->leaves) return member->stretch.look_once_a_while(now_ns());
        course.fiber.leave_off();
    }
}

// A job for `others` threads, from its opening until the last has left it.
inline void run_job(int others, void (*work)(const void*, int), const void* data) {
    Member* member = this_member();
    pool.work = work, pool.data = data;
    pool.caller_cpu = member && member != seen(course.caller) ? -1 : current_cpu();
    __atomic_store_n(&pool.usual, others, __ATOMIC_RELAXED);
    __atomic_store_n(&pool.others, seen(pool.spares_work) ? most_threads(others + 1) - 1 : others, __ATOMIC_RELAXED);
    uint32_t number = number_of(seen(pool.state)) + 1;
    __atomic_store_n(&pool.state, (uint64_t)(number ? number : 1) << NUMBER_SHIFT | OPEN, __ATOMIC_SEQ_CST);
    wake(pool.sleeping, pool.job);
    do_work(work, data);
    __atomic_and_fetch(&pool.state, ~OPEN, __ATOMIC_SEQ_CST);
    int64_t since = now_ns();
    bool slept = wait_for(pool.caller_sleeps, pool.end, [] { return !inside(seen(pool.state)); });
    if ((member = this_member()) && slept) member->stretch.begin_after(since);
}

// The least time that it takes to wake a sleeping thread: what spinning may cost.
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

void forget_threads() {  // a forked process has only its caller's thread, without any time yet
    pool.state = 0, pool.is_taken = pool.threads = pool.sharing = pool.spares = pool.spares_work = 0;
    pool.sleeping = pool.caller_sleeps = 0;
    course.is_taken = course.waits = 0, course.unclaimed = 0, course.caller = nullptr;
    course.fiber.forget();
    calling_member = Member{};
    pool.mutex = PTHREAD_MUTEX_INITIALIZER;
    pool.job = pool.end = pool.need = PTHREAD_COND_INITIALIZER;
}

void prepare_for_forks() {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, [] { pthread_atfork(nullptr, nullptr, forget_threads); });
}

// Threads that a caller requests, without itself.
inline int others_of(int threads) { return (threads < MOST_THREADS ? threads : MOST_THREADS) - 1; }

// Make threads up to this number, or until the system has no more. They leave signals to others.
inline void make_threads(int& there, int count, void* (*code)(void*)) {
    sigset_t others = others_signals(), before;
    pthread_sigmask(SIG_SETMASK, &others, &before);
    for (pthread_t thread; there < count; __atomic_fetch_add(&there, 1, __ATOMIC_SEQ_CST)) {
        if (pthread_create(&thread, nullptr, code, nullptr)) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

inline void add_threads(int count) {
    if (pool.threads >= count) return;
    bool is_first = pool.threads == 0;
    prepare_for_forks();
    make_threads(pool.threads, count, serve);
    if (!is_first || !pool.threads) return;
    int64_t ns = wake_ns();
    ns = ns < LEAST_WAKE_NS ? LEAST_WAKE_NS : ns > MOST_WAKE_NS ? MOST_WAKE_NS : ns;
    __atomic_store_n(&pool.spin_ns, SPIN_WAKES * ns, __ATOMIC_RELAXED);  // threads read it already
}

}  // namespace

extern "C" int kvq_has_to_rest(int thread) {
    Member* member = this_member();
    if (!member || !member->stretch.shares_core() || (!thread && !member->drives)) return 0;
    int others = seen(pool.usual);
    if (!thread && member == seen(course.caller) && seen(pool.sharing) < (others ? others : 1)) return 0;
    return member->leaves = member->stretch.is_over(now_ns());
}

extern "C" void kvq_on_threads(int threads, void (*work)(const void* data, int thread), const void* data) {
    // While another caller has a job, there are no free cores.
    if (threads <= 1 || __atomic_exchange_n(&pool.is_taken, 1, __ATOMIC_ACQUIRE)) return do_work(work, data);
    add_threads(others_of(threads));
    run_job(others_of(threads), work, data);
    __atomic_store_n(&pool.is_taken, 0, __ATOMIC_RELEASE);
}

extern "C" int64_t kvq_times_carried() { return __atomic_load_n(&course.times_carried, __ATOMIC_RELAXED); }

namespace {

inline bool claim(int64_t number) {
    return number && __atomic_compare_exchange_n(&course.unclaimed, &number, 0, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

// Return whether the calling thread has a course for `body`, which no thread has begun yet.
inline bool takes_course(int threads, void (*body)(const void*), const void* data) {
    if (threads <= 1 || this_member()) return false;
    if (__atomic_exchange_n(&course.is_taken, 1, __ATOMIC_ACQUIRE)) {
        int64_t number = seen(course.unclaimed);
        if (!seen(course.has_ended) || !claim(number)) return false;
    }
    prepare_for_forks();
    __atomic_store_n(&course.has_ended, 0, __ATOMIC_SEQ_CST);
    course.number++;
    if (course.fiber.begin(body, data)) return true;
    __atomic_store_n(&course.is_taken, 0, __ATOMIC_RELEASE);
    return false;
}

inline void set_caller(Member* member) {
    own_member = member;
    __atomic_store_n(&course.caller, member, __ATOMIC_SEQ_CST);
}

// At a course's end: let spare threads work as long as they are needed.
// D106: a spare thread where every core is shared
inline void see_to_spares() {
    int threads = seen(pool.threads), all_share = threads && calling_member.stretch.shares_core() &&
                                                  seen(pool.sharing) >= threads;
    if (all_share == seen(pool.spares_work)) return;
    if (all_share) make_threads(pool.spares, (int)most_threads(threads + 1) - 1 - threads, serve_at_need);
    pthread_mutex_lock(&pool.mutex);
    __atomic_store_n(&pool.spares_work, all_share, __ATOMIC_SEQ_CST);
    pthread_cond_broadcast(&pool.need);
    pthread_mutex_unlock(&pool.mutex);
}

// Act as the course's caller, which `begins` it or joins one that others began, until it has ended.
inline void end_course(bool begins) {
    set_caller(&calling_member);
    calling_member.stretch.look_once_a_while(now_ns());
    if (begins) {
        calling_member.drive();
        if (!seen(course.has_ended)) calling_member.rest_if_over();
    }
    calling_member.work_until([] { return seen(course.has_ended) != 0; });
    set_caller(nullptr);
    see_to_spares();
    __atomic_store_n(&course.is_taken, 0, __ATOMIC_RELEASE);
}

}  // namespace

extern "C" void kvq_carry_on(int threads, void (*body)(const void* data), const void* data) {
    takes_course(threads, body, data) ? end_course(true) : body(data);
}

extern "C" int64_t kvq_set_off(int threads, void (*body)(const void* data), const void* data) {
    if (!takes_course(threads, body, data)) return body(data), 0;
    if (!__atomic_exchange_n(&pool.is_taken, 1, __ATOMIC_ACQUIRE)) {  // its owner made some
        add_threads(others_of(threads));
        __atomic_store_n(&pool.is_taken, 0, __ATOMIC_RELEASE);
    }
    int64_t number = course.number;
    __atomic_store_n(&course.unclaimed, number, __ATOMIC_SEQ_CST);
    __atomic_store_n(&course.waits, 1, __ATOMIC_SEQ_CST);
    wake(pool.sleeping, pool.job);
    return number;
}

extern "C" void kvq_see_through(int64_t number) {
    if (claim(number)) end_course(false);  // else it has ended, or is another process's
}
