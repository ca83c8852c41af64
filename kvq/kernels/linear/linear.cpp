// Linear layers on CPUs over weights in codes or floats: see reference.py for what is computed, lanes.h for how.

#include <new>

#include "groups.h"
#include "tasks.h"

// `x` [rows, in_features] and `out` [rows, out_features], both of `code`: KVQ_FP32, KVQ_BF16 or KVQ_FP16.
// Strides of rows are bytes.
KVQ_KERNEL(linear)(const KvqLinear* linear, const uint8_t* x, int64_t x_row, uint8_t* out, int64_t out_row,
                   int code, int64_t rows, int threads) {
    return KVQ_CALL(linear_around)(linear, &NOTHING_AROUND, x, x_row, out, out_row, code, rows, threads);
}

namespace {

// The outputs of a chain's first weight, without those after it.
inline KvqLinear alone(const KvqLinear& linear) {
    KvqLinear own = linear;
    if (linear.next) own.out_features -= linear.next->out_features;
    return own;
}

int multiply_one(const KvqLinear* linear, const KvqAround* around, const uint8_t* x, int64_t x_row, uint8_t* out,
                 int64_t out_row, int code, int64_t rows, int threads) {
    int products = products_of(*linear, code, rows);
    Call call = {*linear, *around, cut_of(*linear), x, x_row, {out, out_row, code, nullptr}, rows,
                 divided(linear->out_features, OUTPUTS), threads, products, rows_of(*linear, products, rows)};
    if (around->bias || around->added) call.out.around = &call.around;
    if (call.panels == 0) return KVQ_OK;
    if (linear->k == 0) {  // an empty sum
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

}  // namespace

// The same with a layer's operations before and after it, with the bits of separate calls.
KVQ_KERNEL(linear_around)(const KvqLinear* linear, const KvqAround* around, const uint8_t* x, int64_t x_row, uint8_t* out,
                          int64_t out_row, int code, int64_t rows, int threads) {
    KvqAround own = *around;
    for (; linear; linear = linear->next) {
        KvqLinear first = alone(*linear);
        int status = multiply_one(&first, &own, x, x_row, out, out_row, code, rows, threads);
        if (status) return status;
        int64_t bytes = first.out_features * bytes_of(code);
        out += bytes;
        if (own.bias) own.bias += bytes;
        if (own.added) own.added += bytes;
    }
    return KVQ_OK;
}

// Return the fastest products of bf16 that this CPU has.
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

// One of several products that share a team of threads, and the offsets of its tiles and tasks among all of them.
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

// Weights of all groups' chains.
inline int count_weights(const KvqGroup* groups, int count) {
    int weights = 0;
    for (int i = 0; i < count; i++)
        for (const KvqLinear* one = groups[i].linear; one; one = one->next) weights++;
    return weights;
}

// Prepare the call's products in `memory`, one for each weight of a chain; without memory, only count its size.
inline Parts lay_out(const KvqGroup* groups, int count, const uint8_t* x, int64_t x_row, Output out, int threads,
                     Memory& memory) {
    int weights = count_weights(groups, count);
    Parts all = {memory.take<Part>(weights), weights, threads, 0, 0, nullptr, nullptr, 0, 0};
    KvqLinear* linears = memory.take<KvqLinear>(weights);
    const KvqLinear* chain = groups->linear;
    Output own = out;
    for (int i = 0; i < weights; i++) {
        KvqLinear first = alone(*chain);
        if (linears) linears[i] = first;
        const KvqLinear& l = linears ? linears[i] : first;
        int products = products_of(l, out.code, groups->rows);
        Call call = {l, NOTHING_AROUND, cut_of(l), x, x_row, own, groups->rows, divided(l.out_features, OUTPUTS),
                     (int)divided(threads, weights), products, rows_of(l, products, groups->rows)};
        int64_t tiles = divided(call.rows, call.tile_rows);
        Memory tile = {};
        take_tile(l, call.cut, products, call.tile_rows, tile);
        call.tile_bytes = tile.used;
        call.tiles = memory.take<uint8_t>(tiles * call.tile_bytes);
        call.block = block_length(call, tiles);
        int64_t columns = columns_size(call);
        call.kept_size = kept_size(call, tiles);  // a task's panels must fit
        if (call.kept_size > all.kept_size) all.kept_size = call.kept_size;
        if (columns > all.columns_size) all.columns_size = columns;
        Split s = split(call, tiles);
        if (all.parts) new (all.parts + i) Part{call, s, all.tiles, all.tasks};
        all.tiles += tiles, all.tasks += s.tasks;
        own.data += l.out_features * bytes_of(out.code);
        if ((chain = chain->next)) continue;
        x += call.rows * x_row, out.data += call.rows * out.row;
        own = out, groups++;
        if (i + 1 < weights) chain = groups->linear;
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
