// Linear layers on CPUs over weights in codes: see reference.py for what is computed, lanes.h for how.
//
// A task is some neighbouring panels times some tiles of rows. Its weights stay in the second-level cache
// while the tiles pass, and each tile's inputs, rounded once for all panels, in the first.

#include "tiles.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

#define NAME_(variant, name) kvq_##variant##_##name
#define NAME(variant, name) NAME_(variant, name)

namespace {

constexpr int64_t CACHED = 384 << 10;    // bytes of weights that stay while tiles pass
constexpr int64_t STREAMED = 128 << 10;  // bytes of a task's weights that are read once
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
    float* columns;  // [threads, k]

    Tile tile(int64_t index) const {
        Memory memory = {tiles + index * tile_bytes, 0};
        int64_t left = rows - index * tile_rows;
        return take_tile(l, cut, (int)(left < tile_rows ? left : tile_rows), memory);
    }
};

inline void round_tile(const Call& call, int64_t index, float* columns) {
    Tile tile = call.tile(index);
    for (int r = 0; r < tile.rows; r++) {
        read_columns(columns, call.l, call.x + (index * call.tile_rows + r) * call.x_row, call.out.code);
        if (call.l.code == KVQ_FP8)
            float_row(tile, r, columns, call.l);
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

template <int R>
inline void multiply_floats(const Call& call, const Tile& tile, int64_t row, int64_t panel, int64_t last) {
    if constexpr (R > 1)
        if (tile.rows < R) return multiply_floats<R - 1>(call, tile, row, panel, last);
    constexpr int P = R * 2 <= FLOAT_CHAINS / 2 ? 4 : R * 2 <= FLOAT_CHAINS ? 2 : 1;
    for (; panel + P <= last; panel += P) float_tile<R, P>(call.l, call.cut, tile, panel, call.out, row);
    for (; panel < last; panel++) float_tile<R, 1>(call.l, call.cut, tile, panel, call.out, row);
}

inline void run_task(const Call& call, int64_t panel, int64_t last, int64_t tile, int64_t last_tile) {
    bool full = call.l.inputs == KVQ_INPUTS_FULL, nibbles = call.l.code == KVQ_INT4;
    for (; tile < last_tile; tile++) {
        Tile inputs = call.tile(tile);
        int64_t row = tile * call.tile_rows;
        if (call.l.code == KVQ_FP8)
            multiply_floats<FLOAT_ROWS>(call, inputs, row, panel, last);
        else if (nibbles && full)
            multiply<true, 2, TILE_ROWS>(call, inputs, row, panel, last);
        else if (nibbles)
            multiply<true, 1, TILE_ROWS>(call, inputs, row, panel, last);
        else if (full)
            multiply<false, 2, TILE_ROWS>(call, inputs, row, panel, last);
        else
            multiply<false, 1, TILE_ROWS>(call, inputs, row, panel, last);
    }
}

inline int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How many panels and tiles a task has: as many as caches hold, if that leaves every thread a few tasks.
struct Split {
    int64_t panels, tiles, tasks_across, tasks;
};

inline Split split(const Call& call, int64_t tiles) {
    int64_t bytes = (int64_t)call.cut.k * OUTPUTS / (call.l.code == KVQ_INT4 ? 2 : 1);
    int64_t few = (tiles > 1 ? CACHED : STREAMED) / bytes, wanted = 4 * call.threads;
    int64_t even = call.panels / wanted, panels = few < even ? few : even;
    panels = panels < 4 ? 4 : panels / 4 * 4;
    if (call.threads > 1 && panels * call.threads > call.panels) panels = 2;
    int64_t across = divided(call.panels, panels), groups = across < wanted ? divided(wanted, across) : 1;
    int64_t each = divided(tiles, groups < tiles ? groups : tiles);
    return {panels, each, across, across * divided(tiles, each)};
}

inline void run(const Call& call) {
    int64_t tiles = divided(call.rows, call.tile_rows);
    Split s = split(call, tiles);
#pragma omp parallel num_threads(call.threads)
    {
#if defined(_OPENMP)
        float* columns = call.columns + (int64_t)omp_get_thread_num() * (call.cut.k + W);
#else
        float* columns = call.columns;
#endif
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < tiles; i++) round_tile(call, i, columns);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < s.tasks; i++) {
            int64_t panel = i % s.tasks_across * s.panels, last = panel + s.panels;
            int64_t tile = i / s.tasks_across * s.tiles, last_tile = tile + s.tiles;
            run_task(call, panel, last < call.panels ? last : call.panels, tile, last_tile < tiles ? last_tile : tiles);
        }
    }
}

}  // namespace

// `x` [rows, in_features] and `out` [rows, out_features], both of `code`: KVQ_FP32, KVQ_BF16 or KVQ_FP16.
// Strides of rows are bytes.
extern "C" int NAME(KVQ_VARIANT, linear)(const KvqLinear* linear, const uint8_t* x, int64_t x_row, uint8_t* out,
                                         int64_t out_row, int code, int64_t rows, int threads) {
    Call call = {*linear, cut_of(*linear), x, x_row, {out, out_row, code}, rows, divided(linear->out_features, OUTPUTS),
                 threads, linear->code == KVQ_FP8 ? FLOAT_ROWS : TILE_ROWS, nullptr, 0, nullptr};
    if (rows * linear->k * linear->out_features < WORTH_THREADS) call.threads = 1;
    int64_t most = rows < MOST_ROWS ? rows : MOST_ROWS;
    Memory sizes = {};
    take_tile(*linear, call.cut, call.tile_rows, sizes);
    call.tile_bytes = sizes.used;
    sizes.used *= divided(most, call.tile_rows);
    int64_t tiles = sizes.used;
    sizes.take<float>(call.threads * (int64_t)(call.cut.k + W));
    Kept* kept = take_memory(sizes.used);
    if (!kept) return KVQ_NO_MEMORY;
    call.tiles = (uint8_t*)kept + 64;
    call.columns = (float*)(call.tiles + tiles);
    for (int64_t first = 0; first < rows; first += MOST_ROWS) {
        call.x = x + first * x_row;
        call.out.data = out + first * out_row;
        call.rows = rows - first < MOST_ROWS ? rows - first : MOST_ROWS;
        run(call);
    }
    give_back(kept);
    return KVQ_OK;
}
