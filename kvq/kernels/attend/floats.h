// Products of query rows with a tile of K, and of weights with a tile of V, that were decoded to fp32.
#pragma once

#include "task.h"

namespace {

KVQ_PREFETCHES void prefetch_row(const KvqRows& rows, int64_t block, int head, int offset) {
    const uint8_t* codes = row_codes(rows, block, head, offset);
    for (int64_t i = 0; i < rows.codes_slot; i += 64) __builtin_prefetch(codes + i);
    if (rows.scales)
        __builtin_prefetch(rows.scales + block * rows.scales_block + head * rows.scales_head +
                           offset * rows.scales_slot);
}

// Decode the rows [skip, keys) from `here` on into their places in `tile`, [TILE, width], and ask for
// `next_keys` rows from `there` on: blocks lie anywhere, and no hardware guesses where the next one is.
inline void read_tile(float* tile, const KvqRows& rows, Cursor here, Cursor there, int head, int width, int skip,
                      int keys, int next_keys) {
    for (int i = skip; i < keys; i++, here.skip(1)) {
        float* x = tile + (int64_t)i * width;
        read_row(x, rows, *here.entry, head, here.offset);
        for (int j = rows.dim; j < width; j++) x[j] = 0;
        if (i - skip >= next_keys) continue;
        prefetch_row(rows, *there.entry, head, there.offset);
        there.skip(1);
    }
}

// scores[key] = q . tile[key] for `keys` keys, rounded up to whole vectors; the rest is garbage.
inline void float_scores(float* scores, const float* q, const float* tile, int width, int keys) {
    for (int key = 0; key < keys; key += W) {
        const float* k = tile + (int64_t)key * width;
        vf sums[W] = {};
        for (int i = 0; i < width; i += W) {
            vf x = load(q + i);
#pragma GCC unroll 16
            for (int j = 0; j < W; j++) sums[j] += x * load(k + (int64_t)j * width + i);
        }
        store(scores + key, sums_of(sums));
    }
}

// out = out * decay + weights . tile for R rows; four vectors of each row stay in registers.
template <int R>
inline void float_values(float* out, const float* decays, const float* weights, const float* tile, int width,
                         int skip, int keys) {
    int i = 0;
    for (; i + 4 * W <= width; i += 4 * W) {
        vf sums[R][4];
        for (int r = 0; r < R; r++)
            for (int j = 0; j < 4; j++) sums[r][j] = load(out + (int64_t)r * width + i + j * W) * all(decays[r]);
        for (int key = skip; key < keys; key++)
            for (int j = 0; j < 4; j++) {
                vf v = load(tile + (int64_t)key * width + i + j * W);
                for (int r = 0; r < R; r++) sums[r][j] += v * weights[r * TILE + key];
            }
        for (int r = 0; r < R; r++)
            for (int j = 0; j < 4; j++) store(out + (int64_t)r * width + i + j * W, sums[r][j]);
    }
    for (; i < width; i += W)
        for (int r = 0; r < R; r++) {
            vf total = load(out + (int64_t)r * width + i) * all(decays[r]);
            for (int key = skip; key < keys; key++)
                total += load(tile + (int64_t)key * width + i) * weights[r * TILE + key];
            store(out + (int64_t)r * width + i, total);
        }
}

}  // namespace
