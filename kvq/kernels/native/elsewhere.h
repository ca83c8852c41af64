// The core on which a thread runs, and the core that it avoids.
#pragma once

#include <sched.h>

namespace {

inline int current_cpu() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

// Move the calling thread off its caller's core, if it runs there: two busy threads would share that core for as long
// as the scheduler gives a busy process on another core the same weight as both of them.
// D103: a thread leaves its caller's core
struct Elsewhere {
#if defined(__linux__)
    cpu_set_t allowed, chosen;
    bool has_chosen = false;

    void leave(int cpu) {
        cpu_set_t now;
        if (cpu < 0 || cpu != sched_getcpu() || sched_getaffinity(0, sizeof now, &now)) return;
        if (!has_chosen || !CPU_EQUAL(&now, &chosen)) allowed = now;  // a choice made elsewhere is the limit
        if (!CPU_ISSET(cpu, &allowed) || CPU_COUNT(&allowed) < 2) return;
        chosen = allowed;
        CPU_CLR(cpu, &chosen);
        has_chosen = !sched_setaffinity(0, sizeof chosen, &chosen);
    }
#else
    void leave(int) {}
#endif
};

}  // namespace
