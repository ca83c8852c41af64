// Products of bf16 numbers and of bytes by the CPU's instructions: tiles (Intel's AMX) and pairs (AVX512-BF16). Their
// presence is tested at run time, so that one variant serves CPUs with and without them.
#pragma once

#include "vectors.h"

#if defined(__AVX512VNNI__) && defined(__linux__) && defined(__x86_64__) && __has_include(<amxtileintrin.h>)
#define KVQ_TILES 1

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define KVQ_TILE_TARGET __attribute__((target("avx512bf16")))
// The compiler must not move memory accesses across these.
#define KVQ_TILE_LOAD(t, p, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(p), "r"((long)(stride)) : "memory")
#define KVQ_TILE_STORE(t, p, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(p), "r"((long)(stride)) : "memory")
#define KVQ_TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : : : "memory")
#define KVQ_TILE_ADD(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")
// Signed bytes of `a` times unsigned ones of `b`.
#define KVQ_TILE_ADD_BYTES(c, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")

namespace {

constexpr int TILE_ROWS = 16;                      // of a tile
constexpr int TILE_PAIRS = 32;                     // bf16 numbers in a row of a tile
constexpr int TILE_SIZE = TILE_ROWS * TILE_PAIRS;  // numbers in a tile

typedef uint16_t bf16;

inline bool has_pairs() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);  // AVX512-BF16
}

// Return whether this CPU has tiles and the kernel lets this process use their registers, which must be requested.
inline bool has_tiles() {
    static int found = -1;
    if (found >= 0) return found;
    unsigned a, b, c, d;
    bool has = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 3) == 3;  // AMX-BF16, -TILE, -INT8
    constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
    return found = has && has_pairs() && !syscall(SYS_arch_prctl, ASK, TILE_DATA);
}

struct alignas(64) TileConfig {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

// `few`: rows of tiles 0 to 4, for sums and inputs; products of fewer rows take less time.
inline void begin_tiles(int few = TILE_ROWS) {
    TileConfig config = {};
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = (uint8_t)(i < 5 ? few : TILE_ROWS);
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
}

// Set tiles 0 to 3, which contain sums, to zero.
inline void zero_sums() {
    KVQ_TILE_ZERO(0);
    KVQ_TILE_ZERO(1);
    KVQ_TILE_ZERO(2);
    KVQ_TILE_ZERO(3);
}

inline void end_tiles() { __asm__ volatile("tilerelease" : : : "memory"); }

}  // namespace

#endif
