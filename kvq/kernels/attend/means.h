// Block means, which were taken from rows of K or V before these were coded. What a block's keys share is worked
// out once: K's mean adds to all of their scores, V's is weighted with the sum of their weights.
#pragma once

#include "floats.h"

namespace {

// The blocks of a tile of which some key is read, the first of them block `first` of the sequence. A block's keys
// are all of those in the tile, read or not, or sums over them would depend on how a context came in.
struct TileBlocks {
    int at, size, first, count;  // at: position of the tile

    TileBlocks(int at, int size, int skip, int keys) : at(at), size(size), first((at + skip) / size) {
        count = (at + keys - 1) / size + 1 - first;
    }

    int begin(int i) const {
        int key = (first + i) * size - at;
        return key > 0 ? key : 0;
    }
    int end(int i) const {
        int64_t key = (int64_t)(first + i + 1) * size - at;
        return key < TILE ? (int)key : TILE;
    }
};

KVQ_PREFETCHES void prefetch_means(const KvqRows& means, Cursor there, int head, int keys) {
    int count = (there.offset + keys - 1) / there.size + 1;
    for (int i = 0; i < count; i++) {
        __builtin_prefetch(row_codes(means, there.entry[i], head, 0));
        __builtin_prefetch(row_scales(means, there.entry[i], head, 0));
    }
}

// Decode the means of `count` blocks from table entry `here` on into `tile`, [count, width], and ask for those of
// the `next_keys` keys from `there` on.
inline void read_means(float* tile, const KvqRows& means, Cursor here, Cursor there, int head, int count, int width,
                       int next_keys) {
    prefetch_means(means, there, head, next_keys);
    for (int i = 0; i < count; i++, tile += width) {
        read_row(tile, means, here.entry[i], head, 0);
        for (int j = means.dim; j < width; j++) tile[j] = 0;
    }
}

// Lane r of the result is the sum of x[r]'s lanes.
inline vf sums_of_four(const vf x[4]) {
    vf sums = quarter_sums(x[0], x[1], x[2], x[3]);
    if constexpr (W >= 16) sums += swapped<W / 2>(sums);
    if constexpr (W >= 8) sums += swapped<4>(sums);
    return sums;
}

// scores [R, TILE] += q [R, width] . the means of the keys' blocks
template <int R>
inline void add_means(float* scores, const float* q, const float* tile, int width, const TileBlocks& blocks) {
    for (int i = 0; i < blocks.count; i++, tile += width) {
        vf products[4] = {};
        for (int j = 0; j < width; j += W) {
            vf x = load(tile + j);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) products[r] += x * load(q + r * width + j);
        }
        vf sums = sums_of_four(products);
        int begin = blocks.begin(i), end = blocks.end(i);
        for (int r = 0; r < R; r++) {
            int key = begin;
            for (; key + W <= end; key += W) store(scores + r * TILE + key, load(scores + r * TILE + key) + sums[r]);
            for (; key < end; key++) scores[r * TILE + key] += sums[r];
        }
    }
}

// The sums [R, TILE] of the blocks' weights.
template <int R>
inline void sum_weights(float* sums, const float* weights, const TileBlocks& blocks) {
    for (int i = 0; i < blocks.count; i++) {
        int key = blocks.begin(i), end = blocks.end(i);
        vf lanes[4] = {};
        float last[R] = {};
        for (; key + W <= end; key += W)
            for (int r = 0; r < R; r++) lanes[r] += load(weights + r * TILE + key);
        for (; key < end; key++)
            for (int r = 0; r < R; r++) last[r] += weights[r * TILE + key];
        vf totals = sums_of_four(lanes);
        for (int r = 0; r < R; r++) sums[r * TILE + i] = totals[r] + last[r];
    }
}

// The same of any number of rows.
inline void add_means(float* scores, const float* q, int rows, const float* tile, int width, const TileBlocks& blocks) {
    for (; rows >= 4; rows -= 4, scores += 4 * TILE, q += 4 * width) add_means<4>(scores, q, tile, width, blocks);
    if (rows == 3) add_means<3>(scores, q, tile, width, blocks);
    if (rows == 2) add_means<2>(scores, q, tile, width, blocks);
    if (rows == 1) add_means<1>(scores, q, tile, width, blocks);
}

inline void sum_weights(float* sums, const float* weights, int rows, const TileBlocks& blocks) {
    for (; rows >= 4; rows -= 4, sums += 4 * TILE, weights += 4 * TILE) sum_weights<4>(sums, weights, blocks);
    if (rows == 3) sum_weights<3>(sums, weights, blocks);
    if (rows == 2) sum_weights<2>(sums, weights, blocks);
    if (rows == 1) sum_weights<1>(sums, weights, blocks);
}

}  // namespace
