// Tiles of integer codes: addresses of their rows, their scales by group, and the kernels that fit them.
#pragma once

#include "integer_matrix.h"
#include "integer_quads.h"
#include "integer_scales.h"
#include "integer_words.h"
#include "../native/memory.h"

#if defined(KVQ_INTEGER)

namespace {

typedef void (*StageKernel)(int32_t*, const Tile&, const Tile&, const Cut&);
typedef void (*KeysKernel)(float*, const IntegerQuery*, int, const Tile&, const Tile&, const Cut&, int);
typedef void (*MatrixKernel)(float*, const IntegerQuery*, const int32_t*, const Tile&, const Segments&, bool);
typedef void (*ValuesKernel)(float*, int, const IntegerWeights*, const float*, const Tile&, const Tile&, const int32_t*,
                             const Cut&);

// The layout of K or V in registers, the places of its elements, and the kernels that fit it.
struct IntegerCut {
    Cut cut;
    int32_t index[MOST_INTEGER_DIM];
    StageKernel stage;
    KeysKernel keys;                      // of K, for few query rows
    int32_t few_index[MOST_INTEGER_DIM];  // for those
    bool is_turned;                       // the kernel transposes words
    bool is_values, is_quads;             // products of V are sums over four tokens' bytes
    Segments segments;                  // of K
    ValuesKernel values[2][MOST_ROWS];  // in place or staged, for 1, 2, 3 and 4 query rows
    ExpandKernel expand, expand_few;    // of codes in planes, for many query rows and for few; else null
    int stride;                         // bytes of an expanded row, whole registers
};

struct IntegerScratch {
    Tile tile, ahead;
    bool is_few;              // K has at most MOST_FEW current query rows
    uint8_t* expanded;        // [TILE, stride] rows of codes that are stored in planes
    float* scales;            // [TILE, numbers of a row's scales] as stored
    int16_t* q;               // [rows, width]
    float* sums;              // [rows, groups]
    IntegerQuery* queries;    // [rows]
    IntegerWeights* weights;  // [rows]
    int32_t* staged;          // [TILE, width / 2] pairs, for many rows
};

inline IntegerCut plain_cut(const KvqRows& rows) {
    IntegerCut c;
    c.cut = cut_of(rows);
    c.is_turned = c.is_values = c.is_quads = false;
    c.expand = c.expand_few = rows.code == KVQ_GROUPED ? expand_kernel(rows.dim, rows.bits) : nullptr;
    c.stride = (c.cut.row_bytes + BYTES - 1) / BYTES * BYTES;
    return c;
}

// Few query rows over codes of up to 4 bits use words, if those fit.
inline void turn(IntegerCut& c, const KvqRows& rows) {
    bool is_narrow = rows.bits == 2 && takes_words<2>(rows);
    if (!c.cut.is_nibbles || !(is_narrow || takes_words<4>(rows))) return;
    c.is_turned = true;
    c.keys = is_narrow ? turned_scores<2> : turned_scores<4>;
    if (is_narrow) c.expand_few = nullptr;
    for (int i = 0; i < rows.dim; i++) c.few_index[i] = i;
}

inline IntegerCut keys_cut(const KvqRows& rows) {
    IntegerCut c = plain_cut(rows);
    for (int i = 0; i < rows.dim; i++) c.index[i] = key_index(c.cut, rows.dim, i);
    c.segments = segments_of(c.cut);
    c.stage = c.cut.is_nibbles ? stage_keys<true> : stage_keys<false>;
    bool pair = c.cut.is_pair;
    if (!c.cut.is_nibbles)
        c.keys = pair ? integer_scores<false, false, true> : integer_scores<false, false, false>;
    else if (c.cut.groups == 1)
        c.keys = pair ? integer_scores<true, true, true> : integer_scores<true, true, false>;
    else
        c.keys = pair ? integer_scores<true, false, true> : integer_scores<true, false, false>;
    memcpy(c.few_index, c.index, sizeof c.index);
    turn(c, rows);
    return c;
}

template <bool NIBBLES, bool TWO, bool STAGED>
inline void set_values(ValuesKernel* values) {
    values[0] = integer_values<NIBBLES, TWO, STAGED, 1>;
    values[1] = integer_values<NIBBLES, TWO, STAGED, 2>;
    values[2] = integer_values<NIBBLES, TWO, STAGED, 3>;
    values[3] = integer_values<NIBBLES, TWO, STAGED, 4>;
}

template <bool NIBBLES, bool TWO>
inline void set_values(IntegerCut& c) {
    c.stage = stage_values<NIBBLES>;
    set_values<NIBBLES, TWO, false>(c.values[0]);
    set_values<NIBBLES, TWO, true>(c.values[1]);
}

inline IntegerCut values_cut(const KvqRows& rows) {
    IntegerCut c = plain_cut(rows);
    c.is_values = true;
    c.is_quads = takes_quads(c.cut);
    for (int i = 0; i < rows.dim; i++) c.index[i] = (c.is_quads ? quad_index : value_index)(c.cut, rows.dim, i);
    if (c.is_quads) {
        c.stage = stage_quads;
        constexpr ValuesKernel KERNELS[] = {quad_values<1>, quad_values<2>, quad_values<3>, quad_values<4>};
        memcpy(c.values[1], KERNELS, sizeof KERNELS);
        return c;
    }
    bool two = c.cut.is_pair || c.cut.is_split;
    if (c.cut.is_nibbles)
        two ? set_values<true, true>(c) : set_values<true, false>(c);
    else
        two ? set_values<false, true>(c) : set_values<false, false>(c);
    return c;
}

inline IntegerScratch take_integer_scratch(const IntegerCut& c, int rows, Memory& memory) {
    IntegerScratch s;
    s.is_few = false;
    int groups = c.cut.groups;
    s.tile.scales = memory.take<float>(2 * groups * TILE);
    s.tile.minimums = s.tile.scales + TILE;
    s.tile.stride = c.cut.is_grouped ? 2 * TILE : TILE;
    s.ahead = s.tile;
    s.expanded = memory.take<uint8_t>(c.expand ? (int64_t)TILE * c.stride : 0);
    s.scales = memory.take<float>(2 * groups * TILE);
    s.q = memory.take<int16_t>((int64_t)rows * c.cut.width);
    s.sums = memory.take<float>(rows * groups);
    s.queries = memory.take<IntegerQuery>(rows);
    s.weights = memory.take<IntegerWeights>(rows);
    int32_t* pairs = memory.take<int32_t>((int64_t)rows * groups * TILE / 2);
    float* factors = memory.take<float>(rows * groups);
    float* minimums = memory.take<float>(rows * groups * W);
    bool is_staged = rows > MOST_FEW || (c.is_quads && rows > 0);
    s.staged = memory.take<int32_t>(is_staged ? TILE * c.cut.width / 2 : 0);
    if (memory.begin)
        for (int r = 0; r < rows; r++)
            s.weights[r] = {pairs + r * groups * TILE / 2, factors + r * groups, minimums + r * groups * W};
    return s;
}

// One of `rows` query rows.
inline void read_integer_query(IntegerScratch& s, const IntegerCut& c, int row, int rows, const float* x, int dim,
                               float scale) {
    int16_t* q = s.q + (int64_t)row * c.cut.width;
    float* sums = s.sums + row * c.cut.groups;
    s.is_few = rows <= MOST_FEW;
    bool is_turned = s.is_few && c.is_turned;
    float factor = integer_query(q, sums, x, dim, c.cut, s.is_few ? c.few_index : c.index, c.cut.is_pair && !is_turned);
    if (is_turned) order_words(q, dim);
    s.queries[row] = {q, sums, factor * scale};
}

// Store `count` addresses, `step` bytes apart.
inline void store_addresses(const uint8_t** out, const uint8_t* first, int64_t step, int count) {
    typedef int64_t addresses __attribute__((vector_size(64)));
    const addresses lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    addresses x = (int64_t)first + lanes * step;
    int i = 0;
    for (; i + 8 <= count; i += 8, x += 8 * step) memcpy(out + i, &x, sizeof x);
    for (; i < count; i++) out[i] = first + i * step;
}

// Find the addresses of the rows [skip, keys) of a tile; other rows get one of these.
inline void find_rows(Tile& tile, const KvqRows& rows, Cursor cursor, int head, int skip, int keys) {
    for (int i = skip; i < keys;) {
        int count = cursor.run(keys - i);
        const uint8_t* row = row_codes(rows, *cursor.entry, head, cursor.offset);
        store_addresses(tile.rows + i, row, rows.codes_slot, count);
        i += count;
        cursor.skip(count);
    }
    for (int i = 0; i < skip; i++) tile.rows[i] = tile.rows[skip];
    for (int i = keys; i < TILE; i++) tile.rows[i] = tile.rows[keys - 1];
}

// Prepare the tile whose rows were found.
inline void read_found_tile(IntegerScratch& s, const KvqRows& rows, const IntegerCut& c, int head, Cursor here,
                            int skip, int keys) {
    s.tile.keys = keys;
    if (ExpandKernel expand = s.is_few ? c.expand_few : c.expand) {
        expand(s.expanded, c.stride, s.tile.rows, rows.dim);
        for (int i = 0; i < TILE; i++) s.tile.rows[i] = s.expanded + i * c.stride;
    }
    read_scales(s.tile, s.scales, rows, c.cut, here, head, skip, keys);
    if (c.is_values && rows.scales) drop_zero_rows(s.tile, rows, c.cut, skip, keys);
}

// Prepare the tile at `here`, and find the addresses of the next one, to prefetch it: blocks are
// anywhere, so hardware can't predict the next one.
inline void read_integer_tile(IntegerScratch& s, const KvqRows& rows, const IntegerCut& c, int head, bool is_first,
                              Cursor here, Cursor there, int skip, int keys, int next_keys) {
    if (is_first)
        find_rows(s.tile, rows, here, head, skip, keys);
    else
        memcpy(s.tile.rows, s.ahead.rows, sizeof s.tile.rows);
    find_rows(s.ahead, rows, there, head, 0, next_keys);
    prefetch_scales(rows, there, head, next_keys);
    read_found_tile(s, rows, c, head, here, skip, keys);
}

// The same if no other tile follows.
inline void read_single_tile(IntegerScratch& s, const KvqRows& rows, const IntegerCut& c, int head, Cursor here,
                             int skip, int keys) {
    find_rows(s.tile, rows, here, head, skip, keys);
    memcpy(s.ahead.rows, s.tile.rows, sizeof s.tile.rows);
    read_found_tile(s, rows, c, head, here, skip, keys);
}

// Scores [rows, TILE] of a tile's first `keys` keys; the others are garbage.
inline void integer_keys(const IntegerScratch& s, const IntegerCut& c, float* scores, int rows, int keys) {
    if (rows <= MOST_FEW) return c.keys(scores, s.queries, rows, s.tile, s.ahead, c.cut, keys);
    c.stage(s.staged, s.tile, s.ahead, c.cut);
    constexpr MatrixKernel KERNELS[] = {matrix_scores<1>, matrix_scores<2>, matrix_scores<3>, matrix_scores<4>};
    for (int r = 0, some; r < rows; r += some) {
        some = some_of(rows - r, MOST_ROWS);
        KERNELS[some - 1](scores + r * TILE, s.queries + r, s.staged, s.tile, c.segments, c.cut.is_grouped);
    }
}

inline void start_values(const IntegerScratch& s, const IntegerCut& c, int rows) {
    for (int r = 0; r < rows; r++) memset(s.weights[r].minimums, 0, (size_t)c.cut.groups * W * 4);
}

// out [rows, stride] = out * decays [rows] + weights [rows, TILE] . tile
inline void integer_values(const IntegerScratch& s, const IntegerCut& c, float* out, int stride, const float* decays,
                           const float* weights, int rows) {
    bool is_staged = rows > MOST_FEW || c.is_quads;
    if (is_staged) c.stage(s.staged, s.tile, s.ahead, c.cut);
    auto prepare = c.is_quads ? quad_weights : c.cut.is_grouped ? integer_weights<true> : integer_weights<false>;
    prepare(s.weights, weights, decays, rows, s.tile, c.cut);
    for (int r = 0, some; r < rows; r += some) {
        some = some_of(rows - r, MOST_ROWS);
        c.values[is_staged][some - 1](out + (int64_t)r * stride, stride, s.weights + r, decays + r, s.tile,
                                      r ? s.tile : s.ahead, s.staged, c.cut);
    }
}

inline void end_values(const IntegerScratch& s, const IntegerCut& c, float* out, int stride, int rows) {
    if (c.cut.is_grouped)
        for (int r = 0; r < rows; r++)
            (c.is_quads ? add_quad_minimums : add_minimums)(out + (int64_t)r * stride, s.weights[r], c.cut);
}

}  // namespace

#else  // without fast products of integers, everything is fp32

namespace {

struct IntegerCut {
    struct {
        int width;
    } cut;
    int32_t index[1];
};
struct IntegerScratch {};

inline bool takes_integers(const KvqRows&) { return false; }
inline IntegerCut keys_cut(const KvqRows&) { return {}; }
inline IntegerCut values_cut(const KvqRows&) { return {}; }
inline IntegerScratch take_integer_scratch(const IntegerCut&, int, Memory&) { return {}; }
inline void read_integer_query(IntegerScratch&, const IntegerCut&, int, int, const float*, int, float) {}
inline void read_integer_tile(IntegerScratch&, const KvqRows&, const IntegerCut&, int, bool, Cursor, Cursor, int,
                              int, int) {}
inline void read_single_tile(IntegerScratch&, const KvqRows&, const IntegerCut&, int, Cursor, int, int) {}
inline void integer_keys(const IntegerScratch&, const IntegerCut&, float*, int, int) {}
inline void start_values(const IntegerScratch&, const IntegerCut&, int) {}
inline void integer_values(const IntegerScratch&, const IntegerCut&, float*, int, const float*, const float*, int) {}
inline void end_values(const IntegerScratch&, const IntegerCut&, float*, int, int) {}

}  // namespace

#endif
