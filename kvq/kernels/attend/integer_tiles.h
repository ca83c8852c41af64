// Tiles of integer codes: addresses of their rows, their scales by group, and the kernels that fit them.
#pragma once

#include "integer_keys.h"
#include "integer_values.h"

#if defined(KVQ_INTEGER)

namespace {

constexpr int MOST_FEW = 4;  // query rows that a kernel over rows in place takes at once

typedef void (*KeysKernel)(float*, const IntegerQuery*, const Tile&, const Tile&, const Cut&, int);
typedef void (*ValuesKernel)(float*, int, const IntegerWeights*, const Tile&, const Tile&, const Cut&);

// The cut of K or V with where its elements go and the kernels for 1, 2, 3 and 4 query rows.
struct IntegerCut {
    Cut cut;
    int32_t index[MOST_INTEGER_DIM];
    KeysKernel keys[MOST_FEW];
    ValuesKernel values[MOST_FEW];
};

struct IntegerScratch {
    Tile tile, ahead;
    float* scales;            // [TILE, numbers of a row's scales] as they lie
    int16_t* q;               // [rows, width]
    float* sums;              // [rows, groups]
    IntegerQuery* queries;    // [rows]
    IntegerWeights* weights;  // [rows]
};

template <bool NIBBLES, bool WHOLE, bool PAIR, int CHUNKS>
inline void set_keys(IntegerCut& c) {
    c.keys[0] = integer_scores<NIBBLES, WHOLE, PAIR, CHUNKS, 1>;
    c.keys[1] = integer_scores<NIBBLES, WHOLE, PAIR, CHUNKS, 2>;
    c.keys[2] = integer_scores<NIBBLES, WHOLE, PAIR, CHUNKS, 3>;
    c.keys[3] = integer_scores<NIBBLES, WHOLE, PAIR, CHUNKS, 4>;
}

template <bool NIBBLES, bool WHOLE>
inline void set_keys(IntegerCut& c) {
    if (c.cut.is_pair)
        set_keys<NIBBLES, WHOLE, true, 1>(c);
    else if (c.cut.chunks == 1)
        set_keys<NIBBLES, WHOLE, false, 1>(c);
    else if (c.cut.chunks == 2)
        set_keys<NIBBLES, WHOLE, false, 2>(c);
    else
        set_keys<NIBBLES, WHOLE, false, 0>(c);
}

inline IntegerCut keys_cut(const KvqRows& rows) {
    IntegerCut c;
    c.cut = cut_of(rows);
    for (int i = 0; i < rows.dim; i++) c.index[i] = key_index(c.cut, rows.dim, i);
    if (!c.cut.is_nibbles)
        set_keys<false, false>(c);
    else if (c.cut.groups == 1)
        set_keys<true, true>(c);
    else
        set_keys<true, false>(c);
    return c;
}

template <bool NIBBLES, bool TWO>
inline void set_values(IntegerCut& c) {
    c.values[0] = integer_values<NIBBLES, TWO, 1>;
    c.values[1] = integer_values<NIBBLES, TWO, 2>;
    c.values[2] = integer_values<NIBBLES, TWO, 3>;
    c.values[3] = integer_values<NIBBLES, TWO, 4>;
}

inline IntegerCut values_cut(const KvqRows& rows) {
    IntegerCut c;
    c.cut = cut_of(rows);
    for (int i = 0; i < rows.dim; i++) c.index[i] = value_index(c.cut, rows.dim, i);
    bool two = c.cut.is_pair || c.cut.is_split;
    if (c.cut.is_nibbles)
        two ? set_values<true, true>(c) : set_values<true, false>(c);
    else
        two ? set_values<false, true>(c) : set_values<false, false>(c);
    return c;
}

template <class Memory>
inline IntegerScratch take_integer_scratch(const IntegerCut& c, int rows, Memory& memory) {
    IntegerScratch s;
    int groups = c.cut.groups;
    s.tile.scales = memory.template take<float>(groups * TILE);
    s.tile.minimums = memory.template take<float>(groups * TILE);
    s.ahead = s.tile;
    s.scales = memory.template take<float>(2 * groups * TILE);
    s.q = memory.template take<int16_t>((int64_t)rows * c.cut.width);
    s.sums = memory.template take<float>(rows * groups);
    s.queries = memory.template take<IntegerQuery>(rows);
    s.weights = memory.template take<IntegerWeights>(rows);
    int32_t* pairs = memory.template take<int32_t>((int64_t)rows * groups * TILE / 2);
    float* factors = memory.template take<float>(2 * rows * groups);
    if (memory.begin)
        for (int r = 0; r < rows; r++)
            s.weights[r] = {pairs + r * groups * TILE / 2, factors + 2 * r * groups, factors + (2 * r + 1) * groups};
    return s;
}

inline void read_integer_query(const IntegerScratch& s, const IntegerCut& c, int row, const float* x, int dim,
                               float scale) {
    int16_t* q = s.q + (int64_t)row * c.cut.width;
    float* sums = s.sums + row * c.cut.groups;
    s.queries[row] = {q, sums, integer_query(q, sums, x, dim, c.cut, c.index) * scale};
}

// Addresses of the rows [skip, keys) of a tile; the others get one of those.
inline void find_rows(Tile& tile, const KvqRows& rows, Cursor cursor, int head, int skip, int keys) {
    for (int i = skip; i < keys;) {
        int count = cursor.run(keys - i);
        const uint8_t* row =
            rows.codes + *cursor.entry * rows.codes_block + head * rows.codes_head + cursor.offset * rows.codes_slot;
        for (int j = 0; j < count; j++) tile.rows[i + j] = row + j * rows.codes_slot;
        i += count;
        cursor.skip(count);
    }
    for (int i = 0; i < skip; i++) tile.rows[i] = tile.rows[skip];
    for (int i = keys; i < TILE; i++) tile.rows[i] = tile.rows[keys - 1];
}

// Columns of [TILE, n] numbers; scales and minimums take turns.
inline void spread_scales(const Tile& tile, const float* from, int n) {
    for (int key = 0; key < TILE; key += W) {
        if (n & (n - 1) || n > 16) {
            for (int i = 0; i < n; i++)
                for (int j = 0; j < W; j++)
                    (i % 2 ? tile.minimums : tile.scales)[i / 2 * TILE + key + j] = from[(key + j) * n + i];
            continue;
        }
        vf x[16], y[16];
        for (int i = 0; i < n; i++) x[i] = load(from + key * n + i * W);
        for (int span = n; span > 1; span /= 2) {  // every round sorts by one more bit of the column
            for (int at = 0; at < n; at += span)
                for (int i = 0; i < span / 2; i++) {
                    y[at + i] = evens(x[at + 2 * i], x[at + 2 * i + 1]);
                    y[at + span / 2 + i] = odds(x[at + 2 * i], x[at + 2 * i + 1]);
                }
            for (int i = 0; i < n; i++) x[i] = y[i];
        }
        for (int i = 0; i < n; i++) {
            int column = 0;
            for (int bit = 1; bit < n; bit *= 2) column = 2 * column + (i & bit ? 1 : 0);
            store((column % 2 ? tile.minimums : tile.scales) + column / 2 * TILE + key, x[i]);
        }
    }
}

inline void prefetch_scales(const KvqRows& rows, Cursor cursor, int head, int keys) {
    if (!rows.scales) return;
    for (int i = 0; i < keys;) {
        int count = cursor.run(keys - i);
        const uint8_t* from =
            rows.scales + *cursor.entry * rows.scales_block + head * rows.scales_head + cursor.offset * rows.scales_slot;
        for (int64_t j = 0; j < count * rows.scales_slot; j += 64) __builtin_prefetch(from + j);
        i += count;
        cursor.skip(count);
    }
}

// Scales and minimums of the rows [skip, keys) by group; those of the others are zero.
inline void read_scales(const IntegerScratch& s, const KvqRows& rows, const Cut& cut, Cursor cursor, int head,
                        int skip, int keys) {
    if (!rows.scales) {
        for (int i = 0; i < TILE; i++) s.tile.scales[i] = i >= skip && i < keys ? rows.static_scales[head] : 0.0f;
        return;
    }
    int n = cut.is_nibbles ? 2 * cut.groups : 1;
    float* to = n == 1 ? s.tile.scales : s.scales;
    for (int i = 0; i < skip * n; i++) to[i] = 0;
    for (int i = keys * n; i < TILE * n; i++) to[i] = 0;
    for (int i = skip; i < keys;) {
        int count = cursor.run(keys - i);
        const uint8_t* from =
            rows.scales + *cursor.entry * rows.scales_block + head * rows.scales_head + cursor.offset * rows.scales_slot;
        if (rows.scales_slot == 2 * n)
            read_fp16(to + i * n, (const uint16_t*)from, count * n);
        else
            for (int j = 0; j < count; j++)
                read_fp16(to + (i + j) * n, (const uint16_t*)(from + j * rows.scales_slot), n);
        i += count;
        cursor.skip(count);
    }
    if (n > 1) spread_scales(s.tile, s.scales, n);
}

// Get ready the tile at `here`, and the addresses of the next one, to be asked for ahead of time:
// blocks lie anywhere, and no hardware guesses where the next one is.
inline void read_integer_tile(IntegerScratch& s, const KvqRows& rows, const IntegerCut& c, int head, bool is_first,
                              Cursor here, Cursor there, int skip, int keys, int next_keys) {
    if (is_first) {
        find_rows(s.tile, rows, here, head, skip, keys);
    } else {
        memcpy(s.tile.rows, s.ahead.rows, sizeof s.tile.rows);
    }
    find_rows(s.ahead, rows, there, head, 0, next_keys);
    prefetch_scales(rows, there, head, next_keys);
    read_scales(s, rows, c.cut, here, head, skip, keys);
}

// Rows of the next kernel call: as even as can be, so that 7 are 4 and 3.
inline int few_of(int rows) { return rows <= MOST_FEW ? rows : rows < 2 * MOST_FEW ? (rows + 1) / 2 : MOST_FEW; }

inline void integer_keys(const IntegerScratch& s, const IntegerCut& c, float* scores, int rows, int keys) {
    for (int r = 0, few; r < rows; r += few) {
        few = few_of(rows - r);
        c.keys[few - 1](scores + r * TILE, s.queries + r, s.tile, s.ahead, c.cut, keys);
    }
}

// out [rows, stride] += weights [rows, TILE] . tile
inline void add_integer_values(const IntegerScratch& s, const IntegerCut& c, float* out, int stride,
                               const float* weights, int rows) {
    for (int r = 0; r < rows; r++) integer_weights(s.weights[r], weights + r * TILE, s.tile, c.cut);
    for (int r = 0, few; r < rows; r += few) {
        few = few_of(rows - r);
        c.values[few - 1](out + (int64_t)r * stride, stride, s.weights + r, s.tile, s.ahead, c.cut);
    }
}

}  // namespace
#endif
