// attend on CPUs, fp32 arithmetic: see reference.py for what it computes.
//
// A task is one KV head of one sequence, at most ROWS of its query rows, and SPLIT keys. Tiles of TILE
// keys are decoded once for all query rows of the task. Splits lie at fixed key positions and every
// query row is computed by itself, so how a context came in changes no bit of what comes out.

#include <stdlib.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "../native/rows.h"

#define NAME_(variant, name) kvq_##variant##_##name
#define NAME(variant, name) NAME_(variant, name)

namespace {

constexpr int ROWS = 64;     // query rows: (new token, query head of the KV head)
constexpr int TILE = 64;     // keys decoded at a time
constexpr int SPLIT = 1024;  // keys of one task; a multiple of TILE

// Softmax of some query rows over some keys, not yet divided by `total`.
struct Partial {
    float* top;    // [ROWS] largest score, -inf if no key was seen
    float* total;  // [ROWS] sum of exp(score - top)
    float* out;    // [ROWS, padded v dim]
};

struct Scratch {
    float* q;       // [ROWS, padded k dim], rotated and scaled
    float* tile;    // [TILE, padded dim]
    float* scores;  // [ROWS, TILE]
    Partial run;    // of the split at work
    Partial sum;    // of all splits before it
};

// All of one call; a task looks its share up here.
struct Call {
    const KvqLayer& layer;
    const KvqDense &q, &out;
    float* lse;  // [tokens, q_heads]
    const KvqBatch& batch;
    const KvqAttention& options;
    int group, k_dim, v_dim;  // query heads of a KV head; padded dimensions
};

// Query rows [row, row + rows) of one KV head of one sequence.
struct Task {
    int sequence, head, row, rows;
    int64_t token;          // index of the sequence's first new token
    int start, keys;        // position of that token; keys that exist
    int first, last;        // splits
    int64_t partial;        // where the splits' partial results begin, or -1 to merge as they come
};

inline float minus_infinity() { return -__builtin_inff(); }

inline int position(const Call& call, const Task& task, int row) {
    return task.start + (task.row + row) / call.group;
}

inline void read_queries(const Call& call, const Task& task, float* q) {
    const KvqRows& k = call.layer.k;
    for (int r = 0; r < task.rows; r++) {
        int64_t token = task.token + (task.row + r) / call.group;
        int head = task.head * call.group + (task.row + r) % call.group;
        float* x = q + (int64_t)r * call.k_dim;
        read_floats(x, call.q.data + token * call.q.token + head * call.q.head, k.dim, call.q.code);
        float scale = call.options.scale;
        if (k.rotated) rotate(x, k.dim);
        for (int i = 0; i < k.dim; i++) x[i] *= scale;
        for (int i = k.dim; i < call.k_dim; i++) x[i] = 0;
    }
}

// Decode the keys [at + skip, at + keys) into their places in `tile`, [TILE, dim].
inline void read_tile(float* tile, const Call& call, const Task& task, const KvqRows& rows, int dim, int at,
                      int skip, int keys) {
    const int32_t* table = call.batch.tables + task.sequence * call.batch.table_stride;
    int size = call.layer.block_size;
    for (int i = skip; i < keys; i++) {
        float* x = tile + (int64_t)i * dim;
        read_row(x, rows, table[(at + i) / size], task.head, (at + i) % size);
        for (int j = rows.dim; j < dim; j++) x[j] = 0;
    }
}

// scores[key] = q . tile[key] for `keys` keys, rounded up to whole vectors; the rest is garbage.
inline void scores_of(float* scores, const float* q, const float* tile, int dim, int keys) {
    for (int key = 0; key < keys; key += W) {
        const float* k = tile + (int64_t)key * dim;
        vf sums[W] = {};
        for (int i = 0; i < dim; i += W) {
            vf x = load(q + i);
#pragma GCC unroll 16
            for (int j = 0; j < W; j++) sums[j] += x * load(k + (int64_t)j * dim + i);
        }
        store(scores + key, sums_of(sums));
    }
}

// Turn scores into weights and let `run` take them in. The keys [low, high) of the tile are visible.
inline void take_weights(float* scores, int keys, int low, int high, float softcap, Partial run, int row,
                         int dim) {
    if (softcap > 0)
        for (int i = low; i < high; i++) scores[i] = softcap * __builtin_tanhf(scores[i] / softcap);
    int whole = (keys + W - 1) / W * W;
    for (int i = 0; i < low; i++) scores[i] = minus_infinity();
    for (int i = high; i < whole; i++) scores[i] = minus_infinity();
    vf most = all(minus_infinity());
    for (int i = 0; i < whole; i += W) most = maximum(most, load(scores + i));
    float top = largest(most);
    if (top < run.top[row]) top = run.top[row];
    if (top == minus_infinity()) top = 0;  // nothing visible: all weights become 0
    vf total{};
    for (int i = 0; i < whole; i += W) {
        vf weight = exp_of(load(scores + i) - all(top));
        store(scores + i, weight);
        total += weight;
    }
    if (top != run.top[row]) {
        float decay = __builtin_expf(run.top[row] - top);
        run.total[row] *= decay;
        for (int i = 0; i < dim; i++) run.out[(int64_t)row * dim + i] *= decay;
        if (low < high) run.top[row] = top;
    }
    run.total[row] += sum(total);
}

// out += weights . tile for R rows; four vectors of each row stay in registers.
template <int R>
inline void add_values(float* out, const float* weights, const float* tile, int dim, int skip, int keys) {
    int i = 0;
    for (; i + 4 * W <= dim; i += 4 * W) {
        vf sums[R][4];
        for (int r = 0; r < R; r++)
            for (int j = 0; j < 4; j++) sums[r][j] = load(out + (int64_t)r * dim + i + j * W);
        for (int key = skip; key < keys; key++)
            for (int j = 0; j < 4; j++) {
                vf v = load(tile + (int64_t)key * dim + i + j * W);
                for (int r = 0; r < R; r++) sums[r][j] += v * weights[r * TILE + key];
            }
        for (int r = 0; r < R; r++)
            for (int j = 0; j < 4; j++) store(out + (int64_t)r * dim + i + j * W, sums[r][j]);
    }
    for (; i < dim; i += W)
        for (int r = 0; r < R; r++) {
            vf total = load(out + (int64_t)r * dim + i);
            for (int key = skip; key < keys; key++)
                total += load(tile + (int64_t)key * dim + i) * weights[r * TILE + key];
            store(out + (int64_t)r * dim + i, total);
        }
}

// Attention of a task's rows over one split, into scratch.run.
inline void run_split(const Call& call, const Task& task, const Scratch& scratch, int split) {
    Partial run = scratch.run;
    for (int r = 0; r < task.rows; r++) run.top[r] = minus_infinity(), run.total[r] = 0;
    memset(run.out, 0, (size_t)task.rows * call.v_dim * 4);
    int window = call.options.window;
    int oldest = window ? position(call, task, 0) - window + 1 : 0;  // what any row sees
    int newest = position(call, task, task.rows - 1);
    int begin = split * SPLIT, end = begin + SPLIT;
    if (end > task.keys) end = task.keys;
    if (end > newest + 1) end = newest + 1;
    for (int at = begin; at < end; at += TILE) {
        int keys = end - at < TILE ? end - at : TILE;
        int skip = oldest > at ? oldest - at : 0;  // older blocks may be gone
        if (skip >= keys) continue;
        read_tile(scratch.tile, call, task, call.layer.k, call.k_dim, at, skip, keys);
        for (int r = 0; r < task.rows; r++) {
            int own = position(call, task, r) - at;  // the row's own key in this tile
            int low = window && own - window + 1 > skip ? own - window + 1 : skip;
            int high = own + 1 < keys ? own + 1 : keys;
            float* scores = scratch.scores + r * TILE;
            if (low >= high) {
                memset(scores, 0, TILE * 4);
                continue;
            }
            scores_of(scores, scratch.q + (int64_t)r * call.k_dim, scratch.tile, call.k_dim, keys);
            take_weights(scores, keys, low, high, call.options.softcap, run, r, call.v_dim);
        }
        read_tile(scratch.tile, call, task, call.layer.v, call.v_dim, at, skip, keys);
        for (int r = 0; r < task.rows;) {
            float *out = run.out + (int64_t)r * call.v_dim, *weights = scratch.scores + r * TILE;
            if (r + 4 <= task.rows)
                add_values<4>(out, weights, scratch.tile, call.v_dim, skip, keys), r += 4;
            else
                add_values<1>(out, weights, scratch.tile, call.v_dim, skip, keys), r += 1;
        }
    }
}

// sum = sum and part, one row of each.
inline void merge_row(Partial sum, Partial part, int row, int dim) {
    if (part.top[row] == minus_infinity()) return;
    float top = sum.top[row] > part.top[row] ? sum.top[row] : part.top[row];
    float old = __builtin_expf(sum.top[row] - top), fresh = __builtin_expf(part.top[row] - top);
    sum.total[row] = sum.total[row] * old + part.total[row] * fresh;
    float *a = sum.out + (int64_t)row * dim, *b = part.out + (int64_t)row * dim;
    for (int i = 0; i < dim; i++) a[i] = a[i] * old + b[i] * fresh;
    sum.top[row] = top;
}

inline void start(Partial sum, int rows, int dim) {
    for (int r = 0; r < rows; r++) sum.top[r] = minus_infinity(), sum.total[r] = 0;
    memset(sum.out, 0, (size_t)rows * dim * 4);
}

// Divide, add the sink, undo V's rotation, and hand the rows over.
inline void write_out(const Call& call, const Task& task, Partial sum) {
    const KvqRows& v = call.layer.v;
    for (int r = 0; r < task.rows; r++) {
        int64_t token = task.token + (task.row + r) / call.group;
        int head = task.head * call.group + (task.row + r) % call.group;
        float* x = sum.out + (int64_t)r * call.v_dim;
        float total = sum.total[r], top = sum.top[r];
        if (call.options.sinks) {
            float sink = call.options.sinks[head], higher = sink > top ? sink : top;
            float decay = __builtin_expf(top - higher);
            total = total * decay + __builtin_expf(sink - higher);
            for (int i = 0; i < v.dim; i++) x[i] *= decay;
            top = higher;
        }
        float inverse = total == 0 ? 0.0f : 1.0f / total;
        for (int i = 0; i < v.dim; i++) x[i] *= inverse;
        if (v.rotated) rotate(x, v.dim);
        write_floats(call.out.data + token * call.out.token + head * call.out.head, x, v.dim, call.out.code);
        call.lse[token * call.options.q_heads + head] = total == 0 ? minus_infinity() : top + __builtin_logf(total);
    }
}

inline int64_t partial_floats(const Call& call) { return (int64_t)ROWS * (2 + call.v_dim); }

inline Partial partial_at(float* memory) {
    return {memory, memory + ROWS, memory + 2 * ROWS};
}

inline Scratch scratch_at(const Call& call, float* memory) {
    int dim = call.k_dim > call.v_dim ? call.k_dim : call.v_dim;
    Scratch s;
    s.q = memory;
    s.tile = s.q + (int64_t)ROWS * call.k_dim;
    s.scores = s.tile + (int64_t)TILE * dim;
    s.run = partial_at(s.scores + ROWS * TILE);
    s.sum = partial_at(s.run.top + partial_floats(call));
    return s;
}

inline int64_t scratch_floats(const Call& call) {
    int dim = call.k_dim > call.v_dim ? call.k_dim : call.v_dim;
    return (int64_t)ROWS * (call.k_dim + TILE) + (int64_t)TILE * dim + 2 * partial_floats(call);
}

inline float* aligned_floats(int64_t count) {
    void* memory = nullptr;
    return posix_memalign(&memory, 64, (size_t)count * 4) ? nullptr : (float*)memory;
}

// One item of parallel work: all of a task, or one of its splits.
struct Item {
    int task, split;  // split -1: all of them
};

struct Plan {
    Task* tasks;
    Item* items;
    int64_t num_tasks, num_items, num_partials;
};

// Count tasks, items and partial results; fill them in where `plan` has room. Sequences of few rows
// have their splits computed side by side, others have tasks enough.
inline void plan_work(const Call& call, Plan& plan) {
    plan.num_tasks = plan.num_items = plan.num_partials = 0;
    int64_t token = 0;
    for (int s = 0; s < call.batch.sequences; s++) {
        int count = call.batch.query_lens[s], context = call.batch.context_lens[s];
        int keys = context - call.batch.skip_last, rows = count * call.group;
        if (keys < 0) keys = 0;
        for (int head = 0; head < call.layer.kv_heads; head++)
            for (int row = 0; row < rows; row += ROWS) {
                Task task = {s, head, row, rows - row < ROWS ? rows - row : ROWS, token, context - count, keys, 0, 0, -1};
                int low = call.options.window ? position(call, task, 0) - call.options.window + 1 : 0;
                int high = position(call, task, task.rows - 1) + 1;
                if (high > keys) high = keys;
                task.first = low > 0 ? low / SPLIT : 0;
                task.last = (high + SPLIT - 1) / SPLIT;
                int splits = task.last - task.first;
                bool apart = rows <= ROWS && splits > 1;
                task.partial = apart ? plan.num_partials : -1;
                for (int i = 0; i < (apart ? splits : 1); i++, plan.num_items++)
                    if (plan.items) plan.items[plan.num_items] = {(int)plan.num_tasks, apart ? task.first + i : -1};
                if (apart) plan.num_partials += splits;
                if (plan.tasks) plan.tasks[plan.num_tasks] = task;
                plan.num_tasks++;
            }
        token += count;
    }
}

inline void run_item(const Call& call, const Plan& plan, Item item, Scratch scratch, float* partials) {
    const Task& task = plan.tasks[item.task];
    read_queries(call, task, scratch.q);
    if (item.split >= 0) {
        int64_t at = task.partial + item.split - task.first;
        scratch.run = partial_at(partials + at * partial_floats(call));
        return run_split(call, task, scratch, item.split);
    }
    start(scratch.sum, task.rows, call.v_dim);
    for (int split = task.first; split < task.last; split++) {
        run_split(call, task, scratch, split);
        for (int r = 0; r < task.rows; r++) merge_row(scratch.sum, scratch.run, r, call.v_dim);
    }
    write_out(call, task, scratch.sum);
}

inline void merge_task(const Call& call, const Task& task, Scratch scratch, float* partials) {
    start(scratch.sum, task.rows, call.v_dim);
    for (int split = task.first; split < task.last; split++) {
        Partial part = partial_at(partials + (task.partial + split - task.first) * partial_floats(call));
        for (int r = 0; r < task.rows; r++) merge_row(scratch.sum, part, r, call.v_dim);
    }
    write_out(call, task, scratch.sum);
}

// Every block that a task may read must exist.
inline bool blocks_exist(const Call& call) {
    int size = call.layer.block_size;
    for (int s = 0; s < call.batch.sequences; s++) {
        if (!call.batch.query_lens[s]) continue;
        const int32_t* table = call.batch.tables + s * call.batch.table_stride;
        int context = call.batch.context_lens[s], first = 0;
        if (call.options.window) {
            int oldest = context - call.batch.query_lens[s] - call.options.window + 1;
            first = oldest > 0 ? oldest / size : 0;
        }
        int last = (context - call.batch.skip_last + size - 1) / size;
        if (last > call.batch.table_width) return false;
        for (int i = first; i < last; i++)
            if (table[i] < 0 || table[i] >= call.layer.num_blocks) return false;
    }
    return true;
}

}  // namespace

extern "C" int NAME(KVQ_VARIANT, attend)(const KvqLayer* layer, const KvqDense* q, const KvqDense* out,
                                         float* lse, const KvqBatch* batch, const KvqAttention* options) {
    Call call = {*layer, *q, *out, lse, *batch, *options, options->q_heads / layer->kv_heads,
                 padded(layer->k.dim), padded(layer->v.dim)};
    if (!blocks_exist(call)) return KVQ_BAD_BLOCK;
    Plan plan = {};
    plan_work(call, plan);
    plan.tasks = (Task*)malloc(plan.num_tasks * sizeof(Task) + 1);
    plan.items = (Item*)malloc(plan.num_items * sizeof(Item) + 1);
    int threads = options->threads;
    if (threads > plan.num_items) threads = plan.num_items > 0 ? (int)plan.num_items : 1;
    int64_t each = scratch_floats(call);
    float* memory = aligned_floats(each * threads + plan.num_partials * partial_floats(call) + 1);
    int status = plan.tasks && plan.items && memory ? KVQ_OK : KVQ_NO_MEMORY;
    if (status == KVQ_OK) {
        plan_work(call, plan);
        float* partials = memory + each * threads;
#pragma omp parallel num_threads(threads)
        {
#if defined(_OPENMP)
            Scratch scratch = scratch_at(call, memory + each * omp_get_thread_num());
#else
            Scratch scratch = scratch_at(call, memory);
#endif
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < plan.num_items; i++) run_item(call, plan, plan.items[i], scratch, partials);
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < plan.num_tasks; i++)
                if (plan.tasks[i].partial >= 0) merge_task(call, plan.tasks[i], scratch, partials);
        }
    }
    free(memory);
    free(plan.items);
    free(plan.tasks);
    return status;
}
