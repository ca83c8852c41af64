// Linear layers on CPUs over weights in codes or floats: see reference.py for what is computed, lanes.h for how.
//
// A task is some neighbouring panels times some tiles of rows. Its weights stay in the second-level cache
// while the tiles pass, and each tile's inputs, rounded once for all panels, in the first. Panels that are too
// long for that are cut into blocks of columns, and sums kept between them.

#include <new>

#include "around.h"
#include "bytes.h"
#include "groups.h"
#include "split.h"

namespace {

constexpr int64_t CACHED = 384 << 10;    // bytes of weights that stay while tiles pass
constexpr int64_t STREAMED = 128 << 10;  // bytes of a task's weights that are read once
constexpr int FEW_PANELS = 4, MOST_PANELS = 16;
constexpr int64_t FEW_TILES = 8;         // that pass one after the other while two panels of codes stay in the first cache
constexpr int BLOCK = 384;             // columns multiplied while tiles pass, where panels are long
constexpr int WHOLE = 32;                // columns that blocks are multiples of
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
    int block;       // columns multiplied while tiles pass; all of them, or as many as BLOCK
    float* columns;  // [threads, columns_size]: a row's columns, and rows that are made
    int64_t columns_size;
    float* kept;     // [threads, kept_size]: sums of a task's outputs between blocks
    int64_t kept_size;

    Tile tile(int64_t index) const {
        Memory memory = {tiles + index * tile_bytes, 0};
        int64_t left = rows - index * tile_rows;
        return take_tile(l, cut, products, (int)(left < tile_rows ? left : tile_rows), memory);
    }
};

// Of `rows` of inputs of `code`.
inline int products_of(const KvqLinear& l, int code, int64_t rows) {
#if defined(KVQ_TILES)
    if (l.code == KVQ_BF16 && code == KVQ_BF16) return l.products;
    if (l.products == KVQ_PRODUCTS_TILES) {
        if (l.code < KVQ_FP8) return KVQ_PRODUCTS_SPLIT;
        if (l.code != KVQ_FP8 && rows > few_byte_rows(l.code) && has_byte_tiles(cut_of(l))) return KVQ_PRODUCTS_BYTES;
    }
#endif
    return KVQ_PRODUCTS_FP32;
}

inline int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int most_rows_of(const KvqLinear& l, int products) {  // of a tile
    if (products == KVQ_PRODUCTS_PAIRS) return PAIR_ROWS;
    if (products == KVQ_PRODUCTS_BYTES) return BYTE_ROWS;
    if (products != KVQ_PRODUCTS_FP32) return MATRIX_ROWS;
    return !has_float_sums(l) ? CODE_ROWS : l.code == KVQ_FP8 ? FP8_ROWS : FLOAT_ROWS;
}

// Few rows are shared out evenly: two sums of 8 rows take less time than one of 12 and one of 4.
inline int rows_of(const KvqLinear& l, int products, int64_t rows) {
    int most = most_rows_of(l, products);
    bool is_matrix = products != KVQ_PRODUCTS_FP32 && products != KVQ_PRODUCTS_PAIRS;
    if (is_matrix || rows > MOST_ROWS) return most;
    return rows > most ? (int)divided(rows, divided(rows, most)) : most;
}

// Floats that a row takes while it is rounded, whole registers of 64 bytes.
inline int64_t row_size(const Cut& cut) { return divided(cut.k, OUTPUTS) * OUTPUTS + OUTPUTS; }

// What rounding a tile takes of every thread.
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
    x = inputs_of(call.around, room, x, x_row, call.l.in_features, call.out.code, tile.rows);
#if defined(KVQ_TILES)
    if (call.products == KVQ_PRODUCTS_TILES) return matrix_rows(tile, call.l, x, x_row);
    if (call.products == KVQ_PRODUCTS_PAIRS) return pair_rows(tile, call.l, x, x_row);
    if (call.products == KVQ_PRODUCTS_SPLIT) return split_rows(tile, call.l, call.cut, x, x_row, call.out.code);
#endif
    if (has_float_sums(call.l) && call.l.inputs == KVQ_INPUTS_FULL)
        return transpose_rows(tile, call.l, x, x_row, call.out.code);
    for (int r = 0; r < tile.rows; r++) {
        const float* row = read_columns(columns, call.l, x + r * x_row, call.out.code, 0, call.cut.k);
        bool in_bytes = call.products == KVQ_PRODUCTS_BYTES;
        int offset = call.l.code == KVQ_INT4 ? ::offset<true> : ::offset<false>;
        if (has_float_sums(call.l))
            round_row_to_fp8(tile, r, row, call.cut.k);
        else if (call.l.inputs == KVQ_INPUTS_FULL)
            round_row<2>(tile, r, row, call.cut, offset, in_bytes);
        else
            round_row<1>(tile, r, row, call.cut, offset, in_bytes);
    }
}

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

// Columns of a block, if `tiles` of rows pass: a few panels of them stay in the cache, where the CPU multiplies in
// tiles in the first one. Of split products two panels' parts and all inputs' stay in the second one.
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

// For every block of columns, a few panels at a time: prepare(panel, begin, end), then for the tiles of rows
// multiply(tile, row, panel, last, block). Sums of a block that is the last one, too, are not kept.
template <class Multiply, class Prepare>
inline void for_blocks(const Call& call, int64_t panel, int64_t last, int64_t tile, int64_t last_tile, float* kept,
                       Multiply multiply, Prepare prepare) {
    int64_t rows = call.tile_rows, kept_panel = call.block < call.cut.k ? rows * OUTPUTS : 0;
    bool pairs = last_tile - tile > 1 || call.products == KVQ_PRODUCTS_SPLIT;
    int64_t together = pairs ? 2 : last - panel;  // panels: two stay in the first cache
    bool passes = call.products == KVQ_PRODUCTS_FP32 && last_tile - tile > 1 && last_tile - tile <= FEW_TILES;
    int64_t bytes = (int64_t)call.cut.k * OUTPUTS * bytes_of(call.l.code);  // of a panel
    auto following = [&](int64_t p, int64_t begin) -> const uint8_t* {  // the weights behind panels before `p`
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

// How many panels and tiles a task has: as many as caches hold, if that leaves every thread a few tasks.
struct Split {
    int64_t panels, tiles, tasks_across, tasks;
};

inline Split split(const Call& call, int64_t tiles) {
    int64_t bytes = (int64_t)call.block * OUTPUTS * bytes_of(call.l.code) / (call.l.code == KVQ_INT4 ? 2 : 1);
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

// `x` [rows, in_features] and `out` [rows, out_features], both of `code`: KVQ_FP32, KVQ_BF16 or KVQ_FP16.
// Strides of rows are bytes.
KVQ_KERNEL(linear)(const KvqLinear* linear, const uint8_t* x, int64_t x_row, uint8_t* out, int64_t out_row,
                   int code, int64_t rows, int threads) {
    return KVQ_CALL(linear_around)(linear, &NOTHING_AROUND, x, x_row, out, out_row, code, rows, threads);
}

// The same between what a layer does before and after it, with the bits of one after the other.
KVQ_KERNEL(linear_around)(const KvqLinear* linear, const KvqAround* around, const uint8_t* x, int64_t x_row, uint8_t* out,
                          int64_t out_row, int code, int64_t rows, int threads) {
    int products = products_of(*linear, code, rows);
    Call call = {*linear, *around, cut_of(*linear), x, x_row, {out, out_row, code, nullptr}, rows,
                 divided(linear->out_features, OUTPUTS), threads, products, rows_of(*linear, products, rows), nullptr, 0, 0,
                 nullptr, 0, nullptr, 0};
    if (around->bias || around->added) call.out.around = &call.around;
    if (call.panels == 0) return KVQ_OK;
    if (linear->k == 0) {  // a sum of nothing
        for (int64_t r = 0; r < rows; r++, out += out_row) {
            memset(out, 0, (size_t)(linear->out_features * bytes_of(code)));
            add_after(*around, out, r, 0, linear->out_features, code);
        }
        return KVQ_OK;
    }
    if (rows * linear->k * linear->out_features < WORTH_SHARING) call.threads = 1;
    int64_t at_once = piece_of(rows), most_tiles = divided(rows < at_once ? rows : at_once, call.tile_rows);
    Memory sizes = {};
    take_tile(*linear, call.cut, products, call.tile_rows, sizes);
    call.tile_bytes = sizes.used;
    sizes.used *= most_tiles;
    call.columns_size = columns_size(call);
    int64_t tiles = sizes.used, columns = most_threads(call.threads) * call.columns_size;
    sizes.take<float>(columns);
    call.kept_size = kept_size(call, most_tiles);
    sizes.take<float>(most_threads(call.threads) * call.kept_size);
    Kept* kept = take_memory(sizes.used);
    if (!kept) return KVQ_NO_MEMORY;
    call.tiles = (uint8_t*)kept + 64;
    call.columns = (float*)(call.tiles + tiles);
    call.kept = call.columns + columns;
    for (int64_t first = 0; first < rows; first += at_once) {
        call.x = x + first * x_row;
        call.out.data = out + first * out_row;
        if (around->added) call.around.added = around->added + first * around->added_row;
        call.rows = rows - first < at_once ? rows - first : at_once;
        call.block = block_length(call, divided(call.rows, call.tile_rows));
        run(call);
    }
    give_back(kept);
    return KVQ_OK;
}

// The products of bf16 that this CPU has, the fastest of them.
KVQ_KERNEL(linear_products)(int* best) {
    *best = KVQ_PRODUCTS_FP32;
#if defined(KVQ_TILES)
    if (has_pairs()) *best = KVQ_PRODUCTS_PAIRS;
    if (has_tiles()) *best = KVQ_PRODUCTS_TILES;
#endif
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

namespace {

// One of several products that share a team of threads, and where its tiles and tasks begin among those of all.
struct Part {
    Call call;
    Split split;
    int64_t first_tile, first_task;
};

struct Parts {
    Part* parts;
    int count, threads;
    int64_t tiles, tasks;
    float *columns, *kept;  // of every thread
    int64_t columns_size, kept_size;

    void round(int64_t tile, int64_t thread) const {
        int i = count - 1;
        while (parts[i].first_tile > tile) i--;
        round_tile(parts[i].call, tile - parts[i].first_tile, columns + thread * columns_size);
    }
    void multiply(int64_t task, int64_t thread) const {
        int i = count - 1;
        while (parts[i].first_task > task) i--;
        run_nth(parts[i].call, parts[i].split, task - parts[i].first_task, kept + thread * kept_size);
    }
};

// The call's products in `memory`; without any only what they take of it is counted.
inline Parts lay_out(const KvqGroup* groups, int count, const uint8_t* x, int64_t x_row, Output out, int threads,
                     Memory& memory) {
    Parts all = {memory.take<Part>(count), count, threads, 0, 0, nullptr, nullptr, 0, 0};
    for (int i = 0; i < count; i++) {
        const KvqLinear& l = *groups[i].linear;
        int products = products_of(l, out.code, groups[i].rows);
        Call call = {l, NOTHING_AROUND, cut_of(l), x, x_row, out, groups[i].rows, divided(l.out_features, OUTPUTS),
                     (int)divided(threads, count), products, rows_of(l, products, groups[i].rows), nullptr, 0, 0, nullptr, 0, nullptr, 0};
        int64_t tiles = divided(call.rows, call.tile_rows);
        Memory tile = {};
        take_tile(l, call.cut, products, call.tile_rows, tile);
        call.tile_bytes = tile.used;
        call.tiles = memory.take<uint8_t>(tiles * call.tile_bytes);
        call.block = block_length(call, tiles);
        int64_t columns = columns_size(call);
        call.kept_size = kept_size(call, tiles);  // a task's panels have to fit
        if (call.kept_size > all.kept_size) all.kept_size = call.kept_size;
        if (columns > all.columns_size) all.columns_size = columns;
        Split s = split(call, tiles);
        if (all.parts) new (all.parts + i) Part{call, s, all.tiles, all.tasks};
        all.tiles += tiles, all.tasks += s.tasks;
        x += call.rows * x_row, out.data += call.rows * out.row;
    }
    all.columns = memory.take<float>(most_threads(threads) * all.columns_size);
    all.kept = memory.take<float>(most_threads(threads) * all.kept_size);
    return all;
}

inline void run(const Parts& all) {
    run_tasks(all.threads, all.tiles, 1, [&](int thread, int64_t i) { all.round(i, thread); });
    run_tasks(all.threads, all.tasks, 1, [&](int thread, int64_t i) { all.multiply(i, thread); });
}

}  // namespace

KVQ_KERNEL(linear_groups)(const KvqGroup* groups, int count, const uint8_t* x, int64_t x_row, uint8_t* out,
                          int64_t out_row, int code, int threads) {
    int64_t products = 0;
    for (int i = 0; i < count; i++) products += groups[i].rows * groups[i].linear->k * groups[i].linear->out_features;
    if (products == 0) return KVQ_OK;
    if (products < WORTH_SHARING) threads = 1;
    Memory memory = {};
    lay_out(groups, count, x, x_row, {out, out_row, code, nullptr}, threads, memory);
    Kept* kept = take_memory(memory.used);
    if (!kept) return KVQ_NO_MEMORY;
    memory = {(uint8_t*)kept + 64, 0};
    run(lay_out(groups, count, x, x_row, {out, out_row, code, nullptr}, threads, memory));
    give_back(kept);
    return KVQ_OK;
}
