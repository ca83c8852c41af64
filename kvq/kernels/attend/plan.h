// The work of one call of attend, split into tasks and items.
#pragma once

#include "integer_channels.h"
#include "means.h"

namespace {

// The data of one call; a task looks up its share here.
struct Call {
    const KvqLayer& layer;
    const KvqDense &q, &out;
    float* lse;  // [tokens, q_heads]
    const KvqBatch& batch;
    const KvqAttention& options;
    int group;             // query heads of a KV head
    int rows;              // most query rows of a task
    int k_width, v_width;  // floats of a decoded row of K, of a row of partial results
    bool k_integer, v_integer;
    IntegerCut k_cut, v_cut;
    Means k_means, v_means;
    bool v_means_lie_alike;  // a row of their results has the layout of a row of V's
    int row_unit;            // partial results have room for a multiple of this many rows
    int most_rows;           // of a task
    bool k_channels;
    ChannelCut channel_cut;
};

inline int position(const Call& call, const Task& task, int row) {
    return task.start + (task.row + row) / call.group;
}

inline bool lie_alike(const Call& call) {
    const Means& means = call.v_means;
    if (!means.rows || means.is_integer != call.v_integer || means.width != call.v_width) return false;
    return !means.is_integer || !memcmp(means.cut.index, call.v_cut.index, (size_t)means.rows->dim * 4);
}

// The keys [low, high) that a query sees.
struct Seen {
    int low, high;
};

// The keys of a query at a position. Neither end decreases from a position to the next.
inline Seen seen_from(const KvqAttention& options, int position) {
    int low = options.window ? position + 1 - options.window : 0, high = position + 1;
    if (low < 0) low = 0;
    if (options.chunk && position / options.chunk * options.chunk > low) low = position / options.chunk * options.chunk;
    if (options.part != KVQ_ALL) {
        int edge = high > options.recent ? (high - options.recent) / options.edge_size * options.edge_size : 0;
        int first = options.part == KVQ_OLD ? options.first : edge;
        if (first > low) low = first;
        if (options.part == KVQ_OLD) high = edge < options.last ? edge : options.last;
    }
    return {low, high};
}

// The keys that any row of a task sees.
inline Seen seen_by(const Call& call, const Task& task) {
    Seen oldest = seen_from(call.options, position(call, task, 0));
    Seen newest = seen_from(call.options, position(call, task, task.rows - 1));
    return {oldest.low, newest.high};
}

// Return the address of a row of Q or of the output.
inline uint8_t* row_of(const Call& call, const Task& task, const KvqDense& x, int row) {
    int64_t token = task.token + (task.row + row) / call.group;
    int head = task.head * call.group + (task.row + row) % call.group;
    return x.data + token * x.token + head * x.head;
}

// One item of parallel work: all of a task, or one of its splits.
// D86: splits at fixed key positions, merged in order
struct Item {
    int task, split;  // split -1: all of them
};

struct Plan {
    Task* tasks;
    Item* items;
    int64_t num_tasks, num_items, num_partials, partial_bytes;
};

inline Partial take_partial(const Call& call, int rows, Memory& memory) {
    float* top = memory.take<float>(rows);
    float* total = memory.take<float>(rows);
    rows = (rows + call.row_unit - 1) / call.row_unit * call.row_unit;
    return {top, total, memory.take<float>((int64_t)rows * call.v_width)};
}

// Least tasks of a sequence that keep all threads busy without splits of the context.
constexpr int ENOUGH_TASKS = 64;

// Count tasks, items and partial results; fill them in if `plan` has room. Splits of sequences
// with few tasks are computed in parallel.
inline void plan_work(const Call& call, Plan& plan) {
    plan.num_tasks = plan.num_items = plan.num_partials = plan.partial_bytes = 0;
    int64_t token = 0;
    for (int s = 0; s < call.batch.sequences; s++) {
        int count = call.batch.query_lens[s], context = call.batch.context_lens[s];
        int rows = count * call.group;
        int cuts = (rows + call.most_rows - 1) / call.most_rows, most = rows ? (rows + cuts - 1) / cuts : call.most_rows;
        for (int head = 0; head < call.layer.kv_heads; head++)
            for (int row = 0; row < rows; row += most) {
                Task task = {s, head, row, rows - row < most ? rows - row : most, token, context - count, 0, 0, -1};
                Seen seen = seen_by(call, task);
                if (seen.low < seen.high) task.first = seen.low / SPLIT, task.last = (seen.high + SPLIT - 1) / SPLIT;
                int splits = task.last - task.first;
                bool apart = splits > 1 && (cuts == 1 || cuts * call.layer.kv_heads < ENOUGH_TASKS);
                task.partial = apart ? plan.num_partials : -1;
                for (int i = 0; i < (apart ? splits : 1); i++, plan.num_items++)
                    if (plan.items) plan.items[plan.num_items] = {(int)plan.num_tasks, apart ? task.first + i : -1};
                Memory sizes = {};
                take_partial(call, task.rows, sizes);
                if (apart) plan.num_partials += splits, plan.partial_bytes += splits * sizes.used;
                if (plan.tasks) plan.tasks[plan.num_tasks] = task;
                plan.num_tasks++;
            }
        token += count;
    }
}

// Every block that a task may read must exist.
inline bool blocks_exist(const Call& call) {
    int size = call.layer.block_size;
    for (int s = 0; s < call.batch.sequences; s++) {
        if (!call.batch.query_lens[s]) continue;
        const int32_t* table = call.batch.tables + s * call.batch.table_stride;
        int context = call.batch.context_lens[s];
        int low = seen_from(call.options, context - call.batch.query_lens[s]).low;
        int high = seen_from(call.options, context - 1).high;
        if (low >= high) continue;
        int last = (high + size - 1) / size;
        if (last > call.batch.table_width) return false;
        for (int i = low / size; i < last; i++)
            if (table[i] < 0 || table[i] >= call.layer.num_blocks) return false;
    }
    return true;
}

}  // namespace
