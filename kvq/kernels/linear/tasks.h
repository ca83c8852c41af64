// A call's tasks: some adjacent panels times some tiles of rows.
//
// A task's weights stay in the second-level cache for all tiles, and each tile's inputs, rounded once for all panels,
// in the first-level cache. Panels too long for that are split into blocks of columns, with sums kept between them.
#pragma once

#include "call.h"

namespace {

template <bool NIBBLES, int PLANES, int R>
inline void multiply(const Call& call, const Tile& tile, int64_t row, int64_t panel, int64_t last, Ahead ahead) {
    if constexpr (R > 1)
        if (tile.rows < R) return multiply<NIBBLES, PLANES, R - 1>(call, tile, row, panel, last, ahead);
    constexpr int P = R > 1 ? CODE_PANELS : 1;
    for (; panel + P <= last; panel += P)
        integer_tile<NIBBLES, R, P, PLANES>(call.l, call.cut, tile, panel, call.out, row, ahead);
    for (; panel < last; panel++)
        integer_tile<NIBBLES, R, 1, PLANES>(call.l, call.cut, tile, panel, call.out, row, ahead);
}

template <int CODE, int R>
// D163: a tenth behind oneDNN, for equal bits
inline void multiply_floats(const Call& call, const Tile& tile, int64_t row, int64_t panel, int64_t last, Block block) {
    if constexpr (R > 1)
        if (tile.rows < R) return multiply_floats<CODE, R - 1>(call, tile, row, panel, last, block);
    constexpr int CHAINS = CODE == KVQ_FP8 ? FP8_CHAINS : FLOAT_CHAINS;
    constexpr int P = R * 4 <= CHAINS ? 4 : R * 2 <= CHAINS ? 2 : 1;
    constexpr int64_t KEPT = R * OUTPUTS;
    for (; panel + P <= last; panel += P, block.kept += P * KEPT)
        float_tile<CODE, R, P>(call.l, call.cut, tile, panel, call.out, row, block);
    for (; panel < last; panel++, block.kept += KEPT)
        float_tile<CODE, R, 1>(call.l, call.cut, tile, panel, call.out, row, block);
}

#if defined(KVQ_TILES)
template <int R>
inline void multiply_pairs(const Call& call, const Tile& tile, int64_t row, int64_t panel, int64_t last, Block block) {
    if constexpr (R > 1)
        if (tile.rows < R) return multiply_pairs<R - 1>(call, tile, row, panel, last, block);
    constexpr int P = R * 4 <= PAIR_CHAINS ? 4 : R * 2 <= PAIR_CHAINS ? 2 : 1;
    constexpr int64_t KEPT = R * OUTPUTS;
    for (; panel + P <= last; panel += P, block.kept += P * KEPT)
        pair_tile<R, P>(call.l, call.cut, tile, panel, call.out, row, block);
    for (; panel < last; panel++, block.kept += KEPT)
        pair_tile<R, 1>(call.l, call.cut, tile, panel, call.out, row, block);
}
#endif

// For every block of columns, a few panels at a time, call prepare(panel, begin, end), then for the tiles of rows
// multiply(tile, row, panel, last, block). Sums of the last block are not kept.
template <class Multiply, class Prepare>
inline void for_blocks(const Call& call, int64_t panel, int64_t last, int64_t tile, int64_t last_tile, float* kept,
                       Multiply multiply, Prepare prepare) {
    int64_t rows = call.tile_rows, kept_panel = call.block < call.cut.k ? rows * OUTPUTS : 0;
    bool pairs = last_tile - tile > 1 || call.products == KVQ_PRODUCTS_SPLIT;
    int64_t together = pairs ? 2 : last - panel;  // panels: two stay in the first-level cache
    bool passes = call.products == KVQ_PRODUCTS_FP32 && last_tile - tile > 1 && last_tile - tile <= FEW_TILES;
    int64_t bytes = (int64_t)call.cut.k * OUTPUTS * bytes_of(call.l.code);  // of a panel
    auto following = [&](int64_t p, int64_t begin) -> const uint8_t* {  // the weights after the panels before `p`
        if (p >= last) p = panel, begin += call.block;
        return begin < call.cut.k ? call.l.codes + p * bytes + begin * bytes / call.cut.k : nullptr;
    };
    for (int begin = 0; begin < call.cut.k; begin += call.block) {
        int end = begin + call.block < call.cut.k ? begin + call.block : call.cut.k;
        for (int64_t p = panel; p < last; p += together) {
            prepare(p, begin, end);
            const uint8_t* next = passes ? following(p + together, begin) : nullptr;
            for (int64_t t = tile; t < last_tile; t++) {
                float* sums = kept + ((t - tile) * (last - panel) + p - panel) * kept_panel;
                Ahead ahead = share_of(next, bytes, divided((end - begin) * bytes, call.cut.k), divided(end - begin, 4), t - tile,
                                       last_tile - tile);
                multiply(call.tile(t), t * rows, p, p + together < last ? p + together : last,
                         Block{begin, end, sums, call.tile_bytes, ahead});
            }
        }
    }
}

inline void unprepared(int64_t, int, int) {}

template <int CODE>
void run_float_task(const Call& call, int64_t panel, int64_t last, int64_t tile, int64_t last_tile, float* kept) {
    constexpr int ROWS = CODE == KVQ_FP8 ? FP8_ROWS : FLOAT_ROWS;
    for_blocks(call, panel, last, tile, last_tile, kept,
               [&](const Tile& inputs, int64_t row, int64_t p, int64_t end, const Block& block) {
                   multiply_floats<CODE, ROWS>(call, inputs, row, p, end, block);
               },
               unprepared);
}

#if defined(KVQ_TILES)
inline void run_bf16_task(const Call& call, int64_t panel, int64_t last, int64_t tile, int64_t last_tile, float* kept) {
    bool in_tiles = call.products == KVQ_PRODUCTS_TILES;
    if (in_tiles) begin_tiles();
    for_blocks(call, panel, last, tile, last_tile, kept,
               [&](const Tile& inputs, int64_t row, int64_t p, int64_t end, const Block& block) {
                   if (in_tiles)
                       matrix_tile(call.l, call.cut, inputs, p, end, call.out, row, block);
                   else
                       multiply_pairs<PAIR_ROWS>(call, inputs, row, p, end, block);
               },
               unprepared);
    if (in_tiles) end_tiles();
}

template <int CODE>
void run_split_task(const Call& call, int64_t panel, int64_t last, int64_t tile, int64_t last_tile, float* kept) {
    begin_tiles(call.rows < TILE_ROWS ? (int)call.rows : TILE_ROWS);
    if (call.rows <= MATRIX_ROWS) {
        Tile inputs = call.tile(0);
        if (call.rows <= TILE_ROWS)
            split_once<CODE, 1>(call.l, call.cut, inputs, panel, last, call.out);
        else
            split_once<CODE, 2>(call.l, call.cut, inputs, panel, last, call.out);
        return end_tiles();
    }
    uint8_t* made = (uint8_t*)kept;
    kept += split_size(call.cut);
    SplitPair pair;
    auto prepare = [&](int64_t p, int begin, int end) {
        pair = split_pair<CODE>(call.l, call.cut, p, last, begin, end, last_tile - tile, made);
    };
    for_blocks(
        call, panel, last, tile, last_tile, kept,
        [&](const Tile& inputs, int64_t row, int64_t p, int64_t, const Block& block) {
            if (inputs.rows <= TILE_ROWS)
                split_many<CODE, 1>(call.l, call.cut, inputs, pair, p, call.out, row, block);
            else
                split_many<CODE, 2>(call.l, call.cut, inputs, pair, p, call.out, row, block);
        },
        prepare);
    end_tiles();
}

template <bool NIBBLES, int PLANES>
void run_byte_task(const Call& call, int64_t panel, int64_t last, int64_t tile, int64_t last_tile, float* kept) {
    begin_tiles();
    for (; panel < last; panel += BYTE_PANELS) {
        BytePanels panels = byte_panels<NIBBLES>(call.l, call.cut, panel, last, (uint8_t*)kept);
        for (int64_t t = tile; t < last_tile; t++)
            byte_tile<PLANES>(call.l, call.cut, call.tile(t), panels, panel, call.out, t * BYTE_ROWS);
    }
    end_tiles();
}

inline void run_byte_task(const Call& call, int64_t panel, int64_t last, int64_t tile, int64_t last_tile, float* kept) {
    bool full = call.l.inputs == KVQ_INPUTS_FULL, nibbles = call.l.code == KVQ_INT4;
    if (nibbles)
        full ? run_byte_task<true, 2>(call, panel, last, tile, last_tile, kept)
             : run_byte_task<true, 1>(call, panel, last, tile, last_tile, kept);
    else
        full ? run_byte_task<false, 2>(call, panel, last, tile, last_tile, kept)
             : run_byte_task<false, 1>(call, panel, last, tile, last_tile, kept);
}

inline void run_split_task(const Call& call, int64_t panel, int64_t last, int64_t tile, int64_t last_tile, float* kept) {
    switch (call.l.code) {
        case KVQ_FP32: return run_split_task<KVQ_FP32>(call, panel, last, tile, last_tile, kept);
        case KVQ_FP16: return run_split_task<KVQ_FP16>(call, panel, last, tile, last_tile, kept);
        case KVQ_BF16: return run_split_task<KVQ_BF16>(call, panel, last, tile, last_tile, kept);
    }
}
#endif

inline void run_block_task(const Call& call, int64_t panel, int64_t last, int64_t tile, int64_t last_tile) {
    int64_t together = last_tile - tile > 1 ? 1 : last - panel;  // a panel stays in the first-level cache
    for (; panel < last; panel += together)
        for (int64_t t = tile; t < last_tile; t++) {
            Tile inputs = call.tile(t);
            KVQ_CALL(block_panels)(&call.l, &inputs, panel, panel + together, &call.out, t * call.tile_rows);
        }
}

inline void run_task(const Call& call, int64_t panel, int64_t last, int64_t tile, int64_t last_tile, float* kept) {
#if defined(KVQ_TILES)
    if (call.products == KVQ_PRODUCTS_BYTES) return run_byte_task(call, panel, last, tile, last_tile, kept);
    if (call.products == KVQ_PRODUCTS_SPLIT) return run_split_task(call, panel, last, tile, last_tile, kept);
    if (call.products != KVQ_PRODUCTS_FP32) return run_bf16_task(call, panel, last, tile, last_tile, kept);
#endif
    switch (call.l.code) {
        case KVQ_FP32: return run_float_task<KVQ_FP32>(call, panel, last, tile, last_tile, kept);
        case KVQ_BF16: return run_float_task<KVQ_BF16>(call, panel, last, tile, last_tile, kept);
        case KVQ_FP16: return run_float_task<KVQ_FP16>(call, panel, last, tile, last_tile, kept);
        case KVQ_FP8: return run_float_task<KVQ_FP8>(call, panel, last, tile, last_tile, kept);
    }
    if (call.l.code == KVQ_BLOCKS) return run_block_task(call, panel, last, tile, last_tile);
    bool full = call.l.inputs == KVQ_INPUTS_FULL, nibbles = call.l.code == KVQ_INT4;
    int64_t tiles = last_tile - tile, together = tiles > FEW_TILES ? last - panel : CODE_PANELS;
    int64_t bytes = nibbles ? panel_bytes<true>(call.cut) : panel_bytes<false>(call.cut);
    bool passes = tiles > 1 && tiles <= FEW_TILES;
    for (; panel < last; panel += together)
        for (int64_t t = tile; t < last_tile; t++) {
            Tile inputs = call.tile(t);
            int64_t row = t * call.tile_rows, end = panel + together < last ? panel + together : last;
            Ahead ahead = share_of(passes && end < last ? call.l.codes + end * bytes : nullptr, bytes, bytes, call.cut.k / 8,
                                   t - tile, tiles);
            if (nibbles && full)
                multiply<true, 2, CODE_ROWS>(call, inputs, row, panel, end, ahead);
            else if (nibbles)
                multiply<true, 1, CODE_ROWS>(call, inputs, row, panel, end, ahead);
            else if (full)
                multiply<false, 2, CODE_ROWS>(call, inputs, row, panel, end, ahead);
            else
                multiply<false, 1, CODE_ROWS>(call, inputs, row, panel, end, ahead);
        }
}

// Numbers of panels and tiles per task: as many as fit in the caches, if that leaves every thread a few tasks.
struct Split {
    int64_t panels, tiles, tasks_across, tasks;
};

inline Split split(const Call& call, int64_t tiles) {
    int64_t bytes = (int64_t)call.block * OUTPUTS * bytes_of(call.l.code) / (call.l.code == KVQ_INT4 ? 2 : 1);
    if (call.l.code == KVQ_BLOCKS) bytes = block_panel_bytes(call.l);
    int64_t few = (tiles > 1 ? CACHED : STREAMED) / bytes, wanted = 4 * call.threads;
    int64_t even = call.panels / wanted, panels = few < even ? few : even;
    if (call.kept_size && panels > MOST_PANELS) panels = MOST_PANELS;
    panels = panels < FEW_PANELS ? FEW_PANELS : panels / FEW_PANELS * FEW_PANELS;
    if (panels * call.threads > call.panels) panels = divided(call.panels, call.threads);
    int64_t across = divided(call.panels, panels), groups = across < wanted ? divided(wanted, across) : 1;
    int64_t each = divided(tiles, groups < tiles ? groups : tiles);
    return {panels, each, across, across * divided(tiles, each)};
}

inline void run_nth(const Call& call, const Split& s, int64_t i, float* kept) {
    int64_t tiles = divided(call.rows, call.tile_rows);
    int64_t panel = i % s.tasks_across * s.panels, last = panel + s.panels;
    int64_t tile = i / s.tasks_across * s.tiles, last_tile = tile + s.tiles;
    run_task(call, panel, last < call.panels ? last : call.panels, tile, last_tile < tiles ? last_tile : tiles, kept);
}

inline void run(const Call& call) {
    int64_t tiles = divided(call.rows, call.tile_rows);
    Split s = split(call, tiles);
    run_tasks(call.threads, tiles, 1,
              [&](int thread, int64_t i) { round_tile(call, i, call.columns + thread * call.columns_size); });
    run_tasks(call.threads, s.tasks, 1,
              [&](int thread, int64_t i) { run_nth(call, s, i, call.kept + thread * call.kept_size); });
}

}  // namespace
