// Code with its own stack, which one thread suspends and another resumes. If the C library lacks the functions for
// this, no fiber begins.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__linux__) && defined(__GLIBC__)

#include <sys/mman.h>
#include <ucontext.h>

#include "signals.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#elif defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace {

// D105: a step continues in whichever thread has a core
class Fiber {
public:
    // Prepare to run body(data); return false if there is no memory for the stack, which is kept from run to run.
    bool begin(void (*body)(const void*), const void* data) {
        if (!is_made_ && !make()) return false;
        body_ = body, data_ = data, has_ended_ = false;
        return true;
    }

    // In a forked process, it may be suspended in a thread that does not exist here.
    void forget() { is_made_ = false; }

    // Run on the calling thread until it is suspended or ends; return true if it has ended.
    bool resume() {
#if defined(__SANITIZE_THREAD__)
        outside_.thread = __tsan_get_current_fiber();
#endif
        change(outside_, inside_);
        return has_ended_;
    }

    // Suspend from inside; returns in the thread that resumes it.
    void leave_off() { change(inside_, outside_); }

private:
    static constexpr size_t SIZE = 8 << 20, GUARD = 64 << 10;  // as much as a thread has; an overflow faults

    struct Side {
        ucontext_t context;
#if defined(__SANITIZE_ADDRESS__)
        void* fake = nullptr;
        const void* bottom = nullptr;
        size_t size = 0;
#elif defined(__SANITIZE_THREAD__)
        void* thread = nullptr;
#endif
    };

    bool make() {
        if (!stack_ && !(stack_ = new_stack())) return false;
        getcontext(&inside_.context);
        inside_.context.uc_stack.ss_sp = stack_, inside_.context.uc_stack.ss_size = SIZE;
        inside_.context.uc_link = nullptr;
        inside_.context.uc_sigmask = others_signals();
        uint64_t self = (uintptr_t)this;  // in halves: only ints are passed on
        makecontext(&inside_.context, (void (*)())run, 2, (unsigned)(self >> 32), (unsigned)self);
#if defined(__SANITIZE_ADDRESS__)
        inside_.bottom = stack_, inside_.size = SIZE;
        __asan_unpoison_memory_region(stack_, SIZE);  // which a process that was forked in a body inherits
#elif defined(__SANITIZE_THREAD__)
        inside_.thread = __tsan_create_fiber(0);
#endif
        return is_made_ = true;
    }

    static uint8_t* new_stack() {
        void* memory = mmap(nullptr, GUARD + SIZE, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
        if (memory == MAP_FAILED) return nullptr;
        if (!mprotect(memory, GUARD, PROT_NONE)) return (uint8_t*)memory + GUARD;
        munmap(memory, GUARD + SIZE);
        return nullptr;
    }

    void change(Side& from, Side& to) {
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_start_switch_fiber(&from.fake, to.bottom, to.size);
#elif defined(__SANITIZE_THREAD__)
        __tsan_switch_to_fiber(to.thread, 0);
#endif
        swapcontext(&from.context, &to.context);
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(from.fake, &to.bottom, &to.size);
#endif
    }

    // For one body after the other.
    static void run(unsigned high, unsigned low) {
        Fiber& self = *(Fiber*)(uintptr_t)((uint64_t)high << 32 | low);
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(nullptr, &self.outside_.bottom, &self.outside_.size);
#endif
        for (;;) {
            self.body_(self.data_);
            self.has_ended_ = true;
            self.leave_off();
        }
    }

    Side inside_, outside_;  // of the thread that resumed it last
    uint8_t* stack_ = nullptr;
    void (*body_)(const void*) = nullptr;
    const void* data_ = nullptr;
    bool is_made_ = false, has_ended_ = true;
};

}  // namespace

#else

namespace {

struct Fiber {
    bool begin(void (*)(const void*), const void*) { return false; }
    void forget() {}
    bool resume() { return true; }
    void leave_off() {}
};

}  // namespace

#endif
