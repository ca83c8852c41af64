// What operations on rows of floats have in common: pieces of a row, threads, and rows that fit the caches.
#pragma once

#include "../attend/memory.h"
#include "pool.h"
#include "rows.h"

namespace {

constexpr int PIECE = 512;                  // elements converted at a time
constexpr int64_t WORTH_THREADS = 1 << 16;  // elements
constexpr int64_t MOST_ROWS = 504;          // between two products at a time, as linear.cpp takes them

// work(scratch, first, n) for rows [first, first + n), all of them in turn until one fails; returns its status.
// `row_bytes`: of scratch memory for a row.
template <class Work>
inline int run_rows(int64_t rows, int64_t row_bytes, Work work) {
    Kept* kept = take_memory((rows < MOST_ROWS ? rows : MOST_ROWS) * row_bytes);
    if (!kept) return KVQ_NO_MEMORY;
    int status = KVQ_OK;
    for (int64_t first = 0; first < rows && !status; first += MOST_ROWS)
        status = work((uint8_t*)kept + 64, first, rows - first < MOST_ROWS ? rows - first : MOST_ROWS);
    give_back(kept);
    return status;
}

}  // namespace
