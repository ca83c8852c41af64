// Scratch memory of a call, in pieces, kept for the next call.
#pragma once

#include <stdint.h>
#include <stdlib.h>

namespace {

// Allocator of pieces of memory, in whole cache lines; without memory it only counts.
struct Memory {
    uint8_t* begin;
    int64_t used;

    template <class T>
    T* take(int64_t count) {
        T* p = begin ? (T*)(begin + used) : nullptr;
        used += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
        return p;
    }
};

// Scratch memory is kept from call to call, so that its pages need not be mapped every time. The
// first thread to take it uses it; others allocate their own.
constexpr int64_t MOST_KEPT = 64 << 20;

struct Kept {
    int64_t bytes;
};

inline Kept*& kept_memory() {
    static Kept* kept = nullptr;
    return kept;
}

inline Kept* take_memory(int64_t bytes) {
    bytes += 64;  // the header's line
    Kept* kept = __atomic_exchange_n(&kept_memory(), nullptr, __ATOMIC_ACQ_REL);
    if (kept && kept->bytes >= bytes) return kept;
    free(kept);
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, (size_t)bytes)) return nullptr;
    kept = (Kept*)memory;
    kept->bytes = bytes;
    return kept;
}

inline void give_back(Kept* memory) {
    if (memory && memory->bytes <= MOST_KEPT)
        memory = __atomic_exchange_n(&kept_memory(), memory, __ATOMIC_ACQ_REL);
    free(memory);
}

}  // namespace
