// Signals that threads of kernels leave to the process's other threads.
#pragma once

#include <signal.h>

namespace {

// All signals except those that a thread's own fault raises.
inline sigset_t others_signals() {
    sigset_t all;
    sigfillset(&all);
    const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS};
    for (int signal : own) sigdelset(&all, signal);
    return all;
}

}  // namespace
