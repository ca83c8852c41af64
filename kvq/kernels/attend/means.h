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

// Decode the means of `count` blocks from table entry `here` on into `tile`, [count, width], and ask for one.
inline void read_means(float* tile, const KvqRows& rows, Cursor here, Cursor there, int head, int count, int width) {
    const KvqRows& means = *rows.means;
    const uint8_t* next = row_codes(means, *there.entry, head, 0);
    __builtin_prefetch(next);
    __builtin_prefetch(row_scales(means, *there.entry, head, 0));
    for (int i = 0; i < count; i++, tile += width) {
        read_row(tile, means, here.entry[i], head, 0);
        for (int j = means.dim; j < width; j++) tile[j] = 0;
    }
}

inline float product(const float* a, const float* b, int width) {
    vf sums{};
    for (int i = 0; i < width; i += W) sums += load(a + i) * load(b + i);
    return sum(sums);
}

// scores [rows, TILE] += q [rows, width] . the means of the keys' blocks
inline void add_means(float* scores, const float* q, int rows, const float* tile, int width, const TileBlocks& blocks) {
    for (int r = 0; r < rows; r++, scores += TILE, q += width)
        for (int i = 0; i < blocks.count; i++) {
            float score = product(q, tile + i * width, width);
            for (int key = blocks.begin(i); key < blocks.end(i); key++) scores[key] += score;
        }
}

// The sum of weights [begin, end) of a tile.
inline float sum_between(const float* weights, int begin, int end) {
    vf sums{};
    for (; begin + W <= end; begin += W) sums += load(weights + begin);
    float total = sum(sums);
    for (; begin < end; begin++) total += weights[begin];
    return total;
}

// The sums [rows, TILE] of the blocks' weights.
inline void sum_weights(float* sums, const float* weights, int rows, const TileBlocks& blocks) {
    for (int r = 0; r < rows; r++, sums += TILE, weights += TILE)
        for (int i = 0; i < blocks.count; i++) sums[i] = sum_between(weights, blocks.begin(i), blocks.end(i));
}

}  // namespace
