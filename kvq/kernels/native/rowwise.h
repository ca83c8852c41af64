// Common parts of operations on rows of floats: pieces of a row, threads, and rows that fit in the caches.
#pragma once

#include "memory.h"
#include "pool.h"
#include "rows.h"

namespace {

constexpr int PIECE = 512;                  // elements converted at a time
constexpr int64_t WORTH_THREADS = 1 << 16;  // elements
// D168: pieces of 192 rows fit in the second cache
constexpr int64_t MOST_ROWS = 192;          // that pass from one product to the next through the second-level cache

// Of the piece that begins at element `first` of `n`.
inline int length_of(int64_t first, int64_t n) { return (int)(n - first < PIECE ? n - first : PIECE); }

// out += x, `n` elements.
inline void add_to(uint8_t* out, const uint8_t* x, int64_t n, int code) {
    for (int64_t first = 0; first < n; first += PIECE) {
        int length = length_of(first, n);
        float room[2][PIECE];
        uint8_t* to = out + first * bytes_of(code);
        const float* a = floats_at(room[0], to, length, code);
        const float* b = floats_at(room[1], x + first * bytes_of(code), length, code);
        float* sums = results_at(room[0], to, length, code);
        for (int i = 0; i < length; i += W) store(sums + i, load(a + i) + load(b + i));
        settle(to, sums, length, code);
    }
}

// x *= factor, `n` elements.
inline void scale_by(uint8_t* x, float factor, int64_t n, int code) {
    for (int64_t first = 0; first < n; first += PIECE) {
        int length = length_of(first, n);
        float room[PIECE];
        uint8_t* to = x + first * bytes_of(code);
        const float* from = floats_at(room, to, length, code);
        float* products = results_at(room, to, length, code);
        for (int i = 0; i < length; i += W) store(products + i, load(from + i) * factor);
        settle(to, products, length, code);
    }
}

// Rows of a piece, if `rows` are split evenly, since each piece reads all weights again; whole tiles on most CPUs.
inline int64_t piece_of(int64_t rows) {
    constexpr int64_t TILE = 12;
    static_assert(MOST_ROWS % TILE == 0, "rounding up gives no more than most");
    if (rows <= MOST_ROWS) return MOST_ROWS;
    int64_t pieces = (rows + MOST_ROWS - 1) / MOST_ROWS, even = (rows + pieces - 1) / pieces;
    return (even + TILE - 1) / TILE * TILE;
}

// Run work(first, n) for rows [first, first + n), piece after piece until one fails; return its status.
template <class Work>
inline int in_turn(int64_t rows, Work work) {
    int64_t most = piece_of(rows);
    int status = KVQ_OK;
    for (int64_t first = 0; first < rows && !status; first += most)
        status = work(first, rows - first < most ? rows - first : most);
    return status;
}

// The same with scratch memory, `row_bytes` per row: work(scratch, first, n).
template <class Work>
inline int run_rows(int64_t rows, int64_t row_bytes, Work work) {
    Kept* kept = take_memory((rows < MOST_ROWS ? rows : MOST_ROWS) * row_bytes);
    if (!kept) return KVQ_NO_MEMORY;
    int status = in_turn(rows, [&](int64_t first, int64_t n) { return work((uint8_t*)kept + 64, first, n); });
    give_back(kept);
    return status;
}

}  // namespace
