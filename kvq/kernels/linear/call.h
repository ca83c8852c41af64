// One call of a Linear layer: its rows, panels and memory, and rounding its inputs.
#pragma once

#include "around.h"
#include "blocks.h"
#include "bytes.h"
#include "split.h"

namespace {

constexpr int64_t CACHED = 384 << 10;    // bytes of weights that stay in the cache for all tiles
constexpr int64_t STREAMED = 128 << 10;  // bytes of a task's weights that are read once
constexpr int FEW_PANELS = 4, MOST_PANELS = 16;
constexpr int64_t FEW_TILES = 8;         // tiles in sequence while two panels of codes stay in the first-level cache
constexpr int BLOCK = 384;             // columns multiplied per pass of tiles, if panels are long
constexpr int WHOLE = 32;                // blocks are a multiple of this many columns
constexpr int64_t WORTH_SHARING = 1 << 17;  // products
constexpr KvqAround NOTHING_AROUND = {};

struct Call {
    const KvqLinear& l;
    KvqAround around;
    Cut cut;
    const uint8_t* x;
    int64_t x_row;  // bytes
    Output out;
    int64_t rows, panels;
    int threads;
    int products;  // KvqProducts
    int tile_rows;
    uint8_t* tiles;
    int64_t tile_bytes;
    int block;       // columns multiplied per pass of tiles; all of them, or BLOCK
    float* columns;  // [threads, columns_size]: a row's columns, and computed rows
    int64_t columns_size;
    float* kept;     // [threads, kept_size]: sums of a task's outputs between blocks
    int64_t kept_size;

    Tile tile(int64_t index) const {
        Memory memory = {tiles + index * tile_bytes, 0};
        int64_t left = rows - index * tile_rows;
        return take_tile(l, cut, products, (int)(left < tile_rows ? left : tile_rows), memory);
    }
};

// For `rows` of inputs of `code`.
inline int products_of(const KvqLinear& l, int code, int64_t rows) {
#if defined(KVQ_TILES)
    if (l.code == KVQ_BF16 && code == KVQ_BF16) return l.products;
    if (l.products == KVQ_PRODUCTS_TILES) {
        if (l.code < KVQ_FP8) return KVQ_PRODUCTS_SPLIT;
        if (l.code != KVQ_FP8 && l.code != KVQ_BLOCKS && rows > few_byte_rows(l.code) && has_byte_tiles(cut_of(l))) return KVQ_PRODUCTS_BYTES;
    }
#endif
    return KVQ_PRODUCTS_FP32;
}

inline int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int most_rows_of(const KvqLinear& l, int products) {  // of a tile
    if (products == KVQ_PRODUCTS_PAIRS) return PAIR_ROWS;
    if (products == KVQ_PRODUCTS_BYTES) return BYTE_ROWS;
    if (products != KVQ_PRODUCTS_FP32) return MATRIX_ROWS;
    if (l.code == KVQ_BLOCKS) return l.inputs == KVQ_INPUTS_FULL ? BLOCK_ROWS_IN_FULL : BLOCK_ROWS;
    return !has_float_sums(l) ? CODE_ROWS : l.code == KVQ_FP8 ? FP8_ROWS : FLOAT_ROWS;
}

// Few rows are divided evenly: two sums of 8 rows take less time than one of 12 and one of 4.
inline int rows_of(const KvqLinear& l, int products, int64_t rows) {
    int most = most_rows_of(l, products);
    bool is_matrix = products != KVQ_PRODUCTS_FP32 && products != KVQ_PRODUCTS_PAIRS;
    if (is_matrix || rows > MOST_ROWS || l.code == KVQ_BLOCKS) return most;
    return rows > most ? (int)divided(rows, divided(rows, most)) : most;
}

// Floats that rounding a row takes, in whole registers of 64 bytes.
inline int64_t row_size(const Cut& cut) { return divided(cut.k, OUTPUTS) * OUTPUTS + OUTPUTS; }

// Memory that rounding a tile takes per thread.
inline int64_t columns_size(const Call& call) {
    int64_t rows = call.rows < call.tile_rows ? call.rows : call.tile_rows;
    int64_t made = makes_rows(call.around) ? rows * call.l.in_features * bytes_of(call.out.code) : 0;
    return row_size(call.cut) + divided(made, 64) * 16;
}

inline void round_tile(const Call& call, int64_t index, float* columns) {
    Tile tile = call.tile(index);
    int64_t x_row = call.x_row;
    const uint8_t* x = call.x + index * call.tile_rows * x_row;
    uint8_t* room = (uint8_t*)(columns + row_size(call.cut));
    x = inputs_of(call.around, room, x, x_row, call.l.in_features, call.out.code, tile.given);
#if defined(KVQ_TILES)
    if (call.products == KVQ_PRODUCTS_TILES) return matrix_rows(tile, call.l, x, x_row);
    if (call.products == KVQ_PRODUCTS_PAIRS) return pair_rows(tile, call.l, x, x_row);
    if (call.products == KVQ_PRODUCTS_SPLIT) return split_rows(tile, call.l, call.cut, x, x_row, call.out.code);
#endif
    if (has_float_sums(call.l) && call.l.inputs == KVQ_INPUTS_FULL)
        return transpose_rows(tile, call.l, x, x_row, call.out.code);
    bool by_segment = call.l.inputs == KVQ_INPUTS_FULL || call.l.inputs == KVQ_INPUTS_GROUPS;
    for (int r = 0; r < tile.given; r++) {
        const float* row = read_columns(columns, call.l, x + r * x_row, call.out.code, 0, call.cut.k);
        bool in_bytes = call.products == KVQ_PRODUCTS_BYTES;
        int offset = call.l.code == KVQ_INT4     ? ::offset<true>
                     : call.l.code == KVQ_BLOCKS ? offset_of(FORMS[call.l.blocks])
                                                 : ::offset<false>;
        if (has_float_sums(call.l))
            round_row_to_fp8(tile, r, row, call.cut.k);
        else if (call.l.inputs == KVQ_INPUTS_FULL)
            round_row<2>(tile, r, row, call.cut, offset, in_bytes, by_segment);
        else
            round_row<1>(tile, r, row, call.cut, offset, in_bytes, by_segment);
    }
}

// Columns of a block for `tiles` of rows: a few panels of them stay in the cache, in the first-level cache if the CPU
// multiplies in tiles. For split products, the parts of two panels and of all inputs stay in the second-level cache.
inline int block_length(const Call& call, int64_t tiles) {
    int64_t bytes = (int64_t)FEW_PANELS * call.cut.k * OUTPUTS * bytes_of(call.l.code);
    int most = call.products == KVQ_PRODUCTS_SPLIT ? SPLIT_BLOCK : BLOCK;
    bool fits = call.products >= KVQ_PRODUCTS_TILES ? call.cut.k <= most : bytes <= CACHED;
    if (tiles <= 1 || !has_float_sums(call.l) || fits) return call.cut.k;
    return (int)divided(divided(call.cut.k, divided(call.cut.k, most)), WHOLE) * WHOLE;
}

// Floats that a thread needs for a call of up to `tiles` of rows: sums that are kept between blocks, and split weights.
inline int64_t kept_size(const Call& call, int64_t tiles) {
    bool in_tiles = call.products == KVQ_PRODUCTS_TILES || call.products == KVQ_PRODUCTS_SPLIT;
    bool keeps = block_length(call, tiles) < call.cut.k || in_tiles;
    int64_t kept = keeps ? tiles * call.tile_rows * MOST_PANELS * OUTPUTS : 0;
#if defined(KVQ_TILES)
    if (call.products == KVQ_PRODUCTS_BYTES && call.l.code == KVQ_INT4) kept = (int64_t)BYTE_PANELS * call.cut.k * OUTPUTS / 4;
    if (call.products == KVQ_PRODUCTS_SPLIT) kept += split_size(call.cut);
#endif
    return kept;
}

}  // namespace
