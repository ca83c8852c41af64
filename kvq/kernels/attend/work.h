// Run a plan's items on threads, merge their results, and write them. Each kind of attention has its own Scratch, with
// `row`, `run` and `sum`, and defines how queries are read and a split is run.
#pragma once

#include "../native/pool.h"
#include "plan.h"
#include "softmax.h"

namespace {

// Turn scores [rows, TILE] of the keys [skip, keys) from position `at` on into weights; hidden keys get 0.
inline void weigh_tile(const Call& call, const Task& task, float* scores, Partial run, Running running, int at,
                       int skip, int keys) {
    int own = position(call, task, 0), left = call.group - task.row % call.group;  // rows of the same token
    Seen seen = seen_from(call.options, own);
    for (int r = 0; r < task.rows; r++, left--) {
        if (left == 0) left = call.group, seen = seen_from(call.options, ++own);
        int low = seen.low - at, high = seen.high - at;
        mask(scores + r * TILE, low > skip ? low : skip, high < keys ? high : keys, call.options.softcap);
    }
    take_weights(scores, task.rows, run, running);
}

// Return the index of an element of V in a row of partial results.
inline int place_of_value(const Call& call, int element) { return call.v_integer ? call.v_cut.index[element] : element; }

// Add the sink, divide, undo V's rotation, and write the rows.
inline void write_out(const Call& call, const Task& task, float* x, const Partial& sum) {
    const KvqRows& v = call.layer.v;
    for (int r = 0; r < task.rows; r++) {
        int64_t token = task.token + (task.row + r) / call.group;
        int head = task.head * call.group + (task.row + r) % call.group;
        const float* out = sum.out + (int64_t)r * call.v_width;
        float total = sum.total[r], top = sum.top[r], decay = 1;
        if (call.options.sinks) {
            float sink = call.options.sinks[head], higher = sink > top ? sink : top;
            decay = top == higher ? 1.0f : __builtin_expf(top - higher);  // both may be infinite
            total = total * decay + (sink == higher ? 1.0f : __builtin_expf(sink - higher));
            top = higher;
        }
        float factor = total == 0 ? 0.0f : decay / total;
        for (int i = 0; i < v.dim; i++) x[i] = out[place_of_value(call, i)] * factor;
        if (v.rotated) rotate(x, v.dim);
        write_floats(row_of(call, task, call.out, r), x, v.dim, call.out.code);
        call.lse[token * call.options.q_heads + head] = total == 0 ? minus_infinity() : top + __builtin_logf(total);
    }
}

// For queries that were read.
template <class Kind>
inline void run_item(const Call& call, const Plan& plan, Item item, typename Kind::Scratch scratch, Partial* partials) {
    const Task& task = plan.tasks[item.task];
    if (item.split >= 0) {
        scratch.run = partials[task.partial + item.split - task.first];
        return Kind::run(call, task, scratch, item.split);
    }
    start(scratch.sum, task.rows, call.v_width);
    for (int split = task.first; split < task.last; split++) {
        Kind::run(call, task, scratch, split);
        for (int r = 0; r < task.rows; r++) merge_row(scratch.sum, scratch.run, r, call.v_width);
    }
    write_out(call, task, scratch.row, scratch.sum);
}

constexpr int MERGED_ROWS = 16;  // of a task, at a time

template <class Kind>
inline void merge_rows(const Call& call, const Task& task, int first, typename Kind::Scratch scratch,
                       const Partial* partials) {
    Task some = task;
    some.row += first;
    some.rows = task.rows - first < MERGED_ROWS ? task.rows - first : MERGED_ROWS;
    start(scratch.sum, some.rows, call.v_width);
    for (int split = task.first; split < task.last; split++) {
        Partial part = partials[task.partial + split - task.first];
        part = {part.top + first, part.total + first, part.out + (int64_t)first * call.v_width};
        for (int r = 0; r < some.rows; r++) merge_row(scratch.sum, part, r, call.v_width);
    }
    write_out(call, some, scratch.row, scratch.sum);
}

// Run a whole call, once `call` has the layout of its rows.
template <class Kind>
inline int run_plan(Call& call) {
    for (int s = 0; s < call.batch.sequences; s++) {
        int rows = call.batch.query_lens[s] * call.group;
        if (rows > call.rows) call.rows = rows < call.most_rows ? rows : call.most_rows;
    }
    Plan plan = {};
    plan_work(call, plan);
    int threads = call.options.threads;
    if (threads > plan.num_items) threads = plan.num_items > 0 ? (int)plan.num_items : 1;
    Memory sizes = {};
    Kind::take(call, sizes);
    int64_t each = sizes.used;
    sizes.used = each * most_threads(threads) + plan.partial_bytes;
    sizes.take<Task>(plan.num_tasks), sizes.take<Item>(plan.num_items), sizes.take<Partial>(plan.num_partials);
    Kept* kept = take_memory(sizes.used);
    if (!kept) return KVQ_NO_MEMORY;
    Memory memory = {(uint8_t*)kept, 64};
    plan.tasks = memory.take<Task>(plan.num_tasks);
    plan.items = memory.take<Item>(plan.num_items);
    Partial* partials = memory.take<Partial>(plan.num_partials);
    plan_work(call, plan);
    for (int64_t i = 0; i < plan.num_tasks; i++) {
        const Task& task = plan.tasks[i];
        for (int split = task.first; task.partial >= 0 && split < task.last; split++)
            partials[task.partial + split - task.first] = take_partial(call, task.rows, memory);
    }
    uint8_t* scratches = memory.begin + memory.used;
    int64_t pieces = (call.rows + MERGED_ROWS - 1) / MERGED_ROWS;  // of a task's rows
    // A thread takes some adjacent splits; each prefetches the first rows of the next.
    int64_t neighbours = plan.num_items / (8 * threads);
    neighbours = neighbours < 1 ? 1 : neighbours > 8 ? 8 : neighbours;
    share_tasks(threads, plan.num_items, neighbours, [&](int thread, Tasks& items) {
        Memory own = {scratches + each * thread, 0};
        typename Kind::Scratch scratch = Kind::take(call, own);
        int read = -1;  // task whose queries were read
        for (int64_t first, last; items.take(thread, first, last);)
            for (int64_t i = first; i < last; i++) {
                Item item = plan.items[i];
                if (i + 1 < last) Kind::ask(call, plan.tasks[plan.items[i + 1].task], plan.items[i + 1].split);
                if (item.task != read) Kind::read(call, plan.tasks[read = item.task], scratch);
                run_item<Kind>(call, plan, item, scratch, partials);
            }
    });
    run_tasks(threads, plan.num_partials ? plan.num_tasks * pieces : 0, 1, [&](int thread, int64_t i) {
        const Task& task = plan.tasks[i / pieces];
        int first = (int)(i % pieces) * MERGED_ROWS;
        if (task.partial < 0 || first >= task.rows) return;
        Memory own = {scratches + each * thread, 0};
        merge_rows<Kind>(call, task, first, Kind::take(call, own), partials);
    });
    give_back(kept);
    return KVQ_OK;
}

}  // namespace
