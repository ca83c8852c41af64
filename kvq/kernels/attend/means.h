// Block means, which were subtracted from rows of K or V before encoding: further keys and values, one per block. K's
// means add to the scores of all keys of their block, V's means are weighted with the sum of the keys' weights.
//
// They are processed for a span of keys at a time, whose blocks' means are a tile. Spans are at fixed positions, like
// splits and tiles, so the chunks of a context don't change a bit.
#pragma once

#include "floats.h"
#include "integer_tiles.h"

namespace {

// The means of K or V in a call.
struct Means {
    const KvqRows* rows;  // or null
    bool is_integer;
    int width;  // floats of a decoded row, or of a row of results
    IntegerCut cut;
};

// D98: means: one more tile per span of keys
struct MeansScratch {
    float* tile;        // [TILE, width], decoded
    float* out;         // [rows, width], V's share of a split
    float* decays;      // [rows] of `out`, since the current span began
    float* scores;      // [rows, TILE], K's for the blocks of a span
    float* weights;     // [rows, TILE], sums of those blocks' weights
    IntegerScratch k, v;
};

inline Means means_of(const KvqRows& rows, bool exact, IntegerCut (*cut_for)(const KvqRows&)) {
    Means m = {rows.means, false, padded(rows.dim), {}};
    if (!m.rows || exact || !takes_integers(*m.rows)) return m;
    m.is_integer = true;
    m.cut = cut_for(*m.rows);
    m.width = m.cut.cut.width;
    return m;
}

inline MeansScratch take_means(const Means& k, const Means& v, int rows, Memory& memory) {
    MeansScratch s;
    int k_rows = k.rows ? rows : 0, v_rows = v.rows ? rows : 0;
    int width = k.rows && !k.is_integer ? k.width : 0;
    if (v.rows && !v.is_integer && v.width > width) width = v.width;
    s.tile = memory.take<float>((int64_t)TILE * width);
    s.out = memory.take<float>((int64_t)v_rows * v.width);
    s.decays = memory.take<float>(v_rows);
    s.scores = memory.take<float>((int64_t)k_rows * TILE);
    s.weights = memory.take<float>((int64_t)v_rows * TILE);
    s.k = take_integer_scratch(k.cut, k.is_integer ? rows : 0, memory);
    s.v = take_integer_scratch(v.cut, v.is_integer ? rows : 0, memory);
    return s;
}

// Keys of a span, so few that the keys of a span are in at most TILE blocks.
inline int span_of(int size) {
    int span = SPLIT;
    while ((span % size ? (span - 2) / size + 2 : span / size) > TILE) span /= 2;
    return span;
}

// The blocks of a span, from block `first` of the sequence on; of these, [skip, count) are read.
struct SpanBlocks {
    int first, skip, count;

    // For the span that contains position `at`; keys [low, high) are seen.
    SpanBlocks(int at, int size, int low, int high) {
        int span = span_of(size), begin = at / span * span, end = begin + span;
        first = begin / size;
        skip = (low > begin ? low : begin) / size - first;
        count = ((high < end ? high : end) - 1) / size + 1 - first;
    }
};

// Prefetch the means of the blocks of `keys` keys from `there` on, a span ahead of their use: prefetching all of a span
// at once would stall.
KVQ_PREFETCHES void prefetch_means(const Means& means, Cursor there, int head, int keys) {
    if (!means.rows) return;
    int count = (there.offset + keys - 1) / there.size + 1;
    for (int i = 0; i < count; i++) {
        __builtin_prefetch(row_codes(*means.rows, there.entry[i], head, 0));
        __builtin_prefetch(row_scales(*means.rows, there.entry[i], head, 0));
    }
}

// Prepare the means of a span's blocks, in separate scratch memory.
inline void read_means(IntegerScratch& integers, float* tile, const Means& means, const KvqBatch& batch, int sequence,
                       int head, const SpanBlocks& blocks) {
    Cursor here(batch, sequence, blocks.first + blocks.skip);
    if (means.is_integer)
        read_single_tile(integers, *means.rows, means.cut, head, here, blocks.skip, blocks.count);
    else
        read_tile(tile, *means.rows, here, here, head, means.width, blocks.skip, blocks.count, 0);
}

// Compute the means' scores for a span's blocks in s.scores; q: [rows, q_width].
inline void score_means(MeansScratch& s, const Means& k, const float* q, int q_width, int rows, const KvqBatch& batch,
                        int sequence, int head, const SpanBlocks& blocks) {
    read_means(s.k, s.tile, k, batch, sequence, head, blocks);
    if (k.is_integer) return integer_keys(s.k, k.cut, s.scores, rows, blocks.count);
    for (int r = 0; r < rows; r++)
        float_scores(s.scores + r * TILE, q + (int64_t)r * q_width, s.tile, k.width, blocks.count);
}

inline void start_means(const MeansScratch& s, const Means& v, int rows) {
    memset(s.out, 0, (size_t)rows * v.width * 4);
    if (v.is_integer) start_values(s.v, v.cut, rows);
}

inline void start_weights(const MeansScratch& s, int rows) {
    memset(s.weights, 0, (size_t)rows * TILE * 4);
    for (int r = 0; r < rows; r++) s.decays[r] = 1;
}

// s.out = s.out * decays + the means times the weights of a span's blocks
inline void add_means(MeansScratch& s, const Means& v, int rows, const KvqBatch& batch, int sequence, int head,
                      const SpanBlocks& blocks) {
    read_means(s.v, s.tile, v, batch, sequence, head, blocks);
    if (v.is_integer) return integer_values(s.v, v.cut, s.out, v.width, s.decays, s.weights, rows);
    all_float_values(s.out, s.decays, s.weights, rows, s.tile, v.width, blocks.skip, blocks.count);
}

// The blocks of a tile of which some key is read, the first of them block `first` of the sequence. A block's keys
// are all of those in the tile, read or not; else sums over them would depend on the chunks of a context.
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

// scores [rows, TILE] of a tile's keys += `means` [rows, TILE], those of the tile's blocks first
inline void add_scores(float* scores, const float* means, int rows, const TileBlocks& blocks) {
    for (int i = 0; i < blocks.count; i++) {
        int begin = blocks.begin(i), end = blocks.end(i);
        for (int r = 0; r < rows; r++) {
            float *x = scores + r * TILE, mean = means[r * TILE + i];
            int key = begin;
            for (; key + W <= end; key += W) store(x + key, load(x + key) + all(mean));
            for (; key < end; key++) x[key] += mean;
        }
    }
}

// Lane r of the result is the sum of x[r]'s lanes.
inline vf sums_of_four(const vf x[4]) {
    vf sums = quarter_sums(x[0], x[1], x[2], x[3]);
    if constexpr (W >= 16) sums += swapped<W / 2>(sums);
    if constexpr (W >= 8) sums += swapped<4>(sums);
    return sums;
}

// sums [R, TILE] of blocks' weights += those of a tile's; the tile's blocks begin at `from`
template <int R>
inline void sum_weights(float* sums, const float* weights, const TileBlocks& blocks, int from) {
    for (int i = 0; i < blocks.count; i++) {
        int key = blocks.begin(i), end = blocks.end(i);
        vf lanes[4] = {};
        float last[R] = {};
        for (; key + W <= end; key += W)
            for (int r = 0; r < R; r++) lanes[r] += load(weights + r * TILE + key);
        for (; key < end; key++)
            for (int r = 0; r < R; r++) last[r] += weights[r * TILE + key];
        vf totals = sums_of_four(lanes);
        for (int r = 0; r < R; r++) sums[r * TILE + from + i] += totals[r] + last[r];
    }
}

// Add a tile's weights [rows, TILE] to s.weights, and the factors of all earlier tiles, from its maximum, to s.decays;
// the span's blocks begin at block `first`.
inline void take_block_weights(const MeansScratch& s, const float* weights, const float* decays, int rows,
                               const TileBlocks& blocks, int first) {
    int from = blocks.first - first;
    for (int r = 0; r < rows; r++) {
        if (decays[r] == 1) continue;  // most tiles: the maximum is unchanged
        s.decays[r] *= decays[r];
        float* to = s.weights + r * TILE;
        for (int i = 0; i <= from; i += W) store(to + i, load(to + i) * all(decays[r]));
    }
    float* sums = s.weights;
    for (; rows >= 4; rows -= 4, sums += 4 * TILE, weights += 4 * TILE) sum_weights<4>(sums, weights, blocks, from);
    if (rows == 3) sum_weights<3>(sums, weights, blocks, from);
    if (rows == 2) sum_weights<2>(sums, weights, blocks, from);
    if (rows == 1) sum_weights<1>(sums, weights, blocks, from);
}

}  // namespace
