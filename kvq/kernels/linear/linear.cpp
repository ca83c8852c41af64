// Linear layers on CPUs over weights in codes or floats: see reference.py for what is computed, lanes.h for how.
//
// A task is some neighbouring panels times some tiles of rows. Its weights stay in the second-level cache
// while the tiles pass, and each tile's inputs, rounded once for all panels, in the first. Panels that are too
// long for that are cut into blocks of columns, and sums kept between them.

#include "../native/pool.h"
#include "tiles.h"

namespace {

constexpr int64_t CACHED = 384 << 10;    // bytes of weights that stay while tiles pass
constexpr int64_t STREAMED = 128 << 10;  // bytes of a task's weights that are read once
constexpr int FEW_PANELS = 4, MOST_PANELS = 16;
constexpr int BLOCK = 384;               // columns multiplied while tiles pass, where panels are long
constexpr int64_t MOST_ROWS = 504;       // rounded at a time, a multiple of every tile
constexpr int64_t WORTH_THREADS = 1 << 17;  // products

struct Call {
    const KvqLinear& l;
    Cut cut;
    const uint8_t* x;
    int64_t x_row;  // bytes
    Output out;
    int64_t rows, panels;
    int threads;
    int tile_rows;
    uint8_t* tiles;
    int64_t tile_bytes;
    int block;       // columns multiplied while tiles pass; all of them, or as many as BLOCK
    float* columns;  // [threads, k]
    float* kept;     // [threads, kept_size]: sums of a task's outputs between blocks
    int64_t kept_size;

    Tile tile(int64_t index) const {
        Memory memory = {tiles + index * tile_bytes, 0};
        int64_t left = rows - index * tile_rows;
        return take_tile(l, cut, (int)(left < tile_rows ? left : tile_rows), memory);
    }
};

inline int rows_of(const KvqLinear& l) {  // of a tile
    return !has_float_sums(l) ? TILE_ROWS : l.code == KVQ_FP8 ? FP8_ROWS : FLOAT_ROWS;
}

inline void round_tile(const Call& call, int64_t index, float* columns) {
    Tile tile = call.tile(index);
    const uint8_t* x = call.x + index * call.tile_rows * call.x_row;
    if (has_float_sums(call.l) && call.l.inputs == KVQ_INPUTS_FULL)
        return transpose_rows(tile, call.l, x, call.x_row, call.out.code);
    for (int r = 0; r < tile.rows; r++) {
        read_columns(columns, call.l, x + r * call.x_row, call.out.code, 0, call.cut.k);
        if (has_float_sums(call.l))
            round_row_to_fp8(tile, r, columns, call.cut.k);
        else if (call.l.inputs == KVQ_INPUTS_FULL)
            round_row<2>(tile, r, columns, call.cut, call.l.code == KVQ_INT4 ? offset<true> : offset<false>);
        else
            round_row<1>(tile, r, columns, call.cut, call.l.code == KVQ_INT4 ? offset<true> : offset<false>);
    }
}

template <bool NIBBLES, int PLANES, int R>
inline void multiply(const Call& call, const Tile& tile, int64_t row, int64_t panel, int64_t last) {
    if constexpr (R > 1)
        if (tile.rows < R) return multiply<NIBBLES, PLANES, R - 1>(call, tile, row, panel, last);
    constexpr int P = R > 1 ? TILE_PANELS : 1;
    for (; panel + P <= last; panel += P)
        integer_tile<NIBBLES, R, P, PLANES>(call.l, call.cut, tile, panel, call.out, row);
    for (; panel < last; panel++) integer_tile<NIBBLES, R, 1, PLANES>(call.l, call.cut, tile, panel, call.out, row);
}

template <int CODE, int R>
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

inline int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Columns of a block, if `tiles` of rows pass: a few panels of them stay in the cache.
inline int block_length(const Call& call, int64_t tiles) {
    int64_t bytes = (int64_t)FEW_PANELS * call.cut.k * OUTPUTS * bytes_of(call.l.code);
    if (tiles <= 1 || !has_float_sums(call.l) || bytes <= CACHED) return call.cut.k;
    return (int)divided(divided(call.cut.k, divided(call.cut.k, BLOCK)), 8) * 8;
}

template <int CODE>
void run_float_task(const Call& call, int64_t panel, int64_t last, int64_t tile, int64_t last_tile, float* kept) {
    constexpr int ROWS = CODE == KVQ_FP8 ? FP8_ROWS : FLOAT_ROWS;
    int64_t kept_tile = (last - panel) * ROWS * OUTPUTS;
    int64_t together = last_tile - tile > 1 ? 2 : last - panel;  // panels: two stay in the first cache
    for (int begin = 0; begin < call.cut.k; begin += call.block) {
        int end = begin + call.block < call.cut.k ? begin + call.block : call.cut.k;
        for (int64_t p = panel; p < last; p += together)
            for (int64_t t = tile; t < last_tile; t++)
                multiply_floats<CODE, ROWS>(call, call.tile(t), t * ROWS, p, p + together < last ? p + together : last,
                                            {begin, end, kept + (t - tile) * kept_tile + (p - panel) * ROWS * OUTPUTS});
    }
}

inline void run_task(const Call& call, int64_t panel, int64_t last, int64_t tile, int64_t last_tile, float* kept) {
    switch (call.l.code) {
        case KVQ_FP32: return run_float_task<KVQ_FP32>(call, panel, last, tile, last_tile, kept);
        case KVQ_BF16: return run_float_task<KVQ_BF16>(call, panel, last, tile, last_tile, kept);
        case KVQ_FP16: return run_float_task<KVQ_FP16>(call, panel, last, tile, last_tile, kept);
        case KVQ_FP8: return run_float_task<KVQ_FP8>(call, panel, last, tile, last_tile, kept);
    }
    bool full = call.l.inputs == KVQ_INPUTS_FULL, nibbles = call.l.code == KVQ_INT4;
    for (; tile < last_tile; tile++) {
        Tile inputs = call.tile(tile);
        int64_t row = tile * call.tile_rows;
        if (nibbles && full)
            multiply<true, 2, TILE_ROWS>(call, inputs, row, panel, last);
        else if (nibbles)
            multiply<true, 1, TILE_ROWS>(call, inputs, row, panel, last);
        else if (full)
            multiply<false, 2, TILE_ROWS>(call, inputs, row, panel, last);
        else
            multiply<false, 1, TILE_ROWS>(call, inputs, row, panel, last);
    }
}

// How many panels and tiles a task has: as many as caches hold, if that leaves every thread a few tasks.
struct Split {
    int64_t panels, tiles, tasks_across, tasks;
};

inline Split split(const Call& call, int64_t tiles) {
    int64_t bytes = (int64_t)call.block * OUTPUTS * bytes_of(call.l.code) / (call.l.code == KVQ_INT4 ? 2 : 1);
    int64_t few = (tiles > 1 ? CACHED : STREAMED) / bytes, wanted = 4 * call.threads;
    int64_t even = call.panels / wanted, panels = few < even ? few : even;
    if (call.block < call.cut.k && panels > MOST_PANELS) panels = MOST_PANELS;
    panels = panels < FEW_PANELS ? FEW_PANELS : panels / FEW_PANELS * FEW_PANELS;
    if (panels * call.threads > call.panels) panels = divided(call.panels, call.threads);
    int64_t across = divided(call.panels, panels), groups = across < wanted ? divided(wanted, across) : 1;
    int64_t each = divided(tiles, groups < tiles ? groups : tiles);
    return {panels, each, across, across * divided(tiles, each)};
}

inline void run(const Call& call) {
    int64_t tiles = divided(call.rows, call.tile_rows);
    Split s = split(call, tiles);
    auto task = [&](int64_t i, float* kept) {
        int64_t panel = i % s.tasks_across * s.panels, last = panel + s.panels;
        int64_t tile = i / s.tasks_across * s.tiles, last_tile = tile + s.tiles;
        run_task(call, panel, last < call.panels ? last : call.panels, tile, last_tile < tiles ? last_tile : tiles, kept);
    };
    run_tasks(call.threads, tiles, 1,
              [&](int thread, int64_t i) { round_tile(call, i, call.columns + thread * (call.cut.k + W)); });
    run_tasks(call.threads, s.tasks, 1, [&](int thread, int64_t i) { task(i, call.kept + thread * call.kept_size); });
}

}  // namespace

// `x` [rows, in_features] and `out` [rows, out_features], both of `code`: KVQ_FP32, KVQ_BF16 or KVQ_FP16.
// Strides of rows are bytes.
KVQ_KERNEL(linear)(const KvqLinear* linear, const uint8_t* x, int64_t x_row, uint8_t* out, int64_t out_row,
                   int code, int64_t rows, int threads) {
    Call call = {*linear, cut_of(*linear), x, x_row, {out, out_row, code}, rows, divided(linear->out_features, OUTPUTS),
                 threads, rows_of(*linear), nullptr, 0, 0, nullptr, nullptr, 0};
    if (call.panels == 0) return KVQ_OK;
    if (rows * linear->k * linear->out_features < WORTH_THREADS) call.threads = 1;
    int64_t most = rows < MOST_ROWS ? rows : MOST_ROWS, most_tiles = divided(most, call.tile_rows);
    Memory sizes = {};
    take_tile(*linear, call.cut, call.tile_rows, sizes);
    call.tile_bytes = sizes.used;
    sizes.used *= most_tiles;
    int64_t tiles = sizes.used, columns = call.threads * (int64_t)(call.cut.k + W);
    sizes.take<float>(columns);
    if (block_length(call, most_tiles) < call.cut.k)
        call.kept_size = most_tiles * call.tile_rows * MOST_PANELS * OUTPUTS;
    sizes.take<float>(call.threads * call.kept_size);
    Kept* kept = take_memory(sizes.used);
    if (!kept) return KVQ_NO_MEMORY;
    call.tiles = (uint8_t*)kept + 64;
    call.columns = (float*)(call.tiles + tiles);
    call.kept = call.columns + columns;
    for (int64_t first = 0; first < rows; first += MOST_ROWS) {
        call.x = x + first * x_row;
        call.out.data = out + first * out_row;
        call.rows = rows - first < MOST_ROWS ? rows - first : MOST_ROWS;
        call.block = block_length(call, divided(call.rows, call.tile_rows));
        run(call);
    }
    give_back(kept);
    return KVQ_OK;
}

// The same for several at once: the i-th multiplies rows at `x` + i * x_each, and its results go to `out` + i * out_each.
KVQ_KERNEL(linear_each)(const KvqLinear* linears, int count, const uint8_t* x, int64_t x_row, int64_t x_each,
                        uint8_t* out, int64_t out_row, int64_t out_each, int code, int64_t rows, int threads) {
    int failed = KVQ_OK;
    run_tasks(threads, count, 1, [&](int, int64_t i) {
        int status = KVQ_CALL(linear)(linears + i, x + i * x_each, x_row, out + i * out_each, out_row, code, rows, 1);
        if (status) __atomic_store_n(&failed, status, __ATOMIC_RELAXED);
    });
    return failed;
}
