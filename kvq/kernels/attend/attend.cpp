// attend on CPUs: see reference.py for what it computes. INT8 and grouped codes are multiplied as integers
// where the CPU can do that fast, everything else as fp32.
//
// A task is one KV head of one sequence and at most ROWS of its query rows, over splits of SPLIT keys.
// A tile of TILE keys is decoded once for all query rows of the task. Splits are at fixed key positions,
// and every query row is computed separately, so the chunks of a context don't change a bit of the results.

#include "work.h"

namespace {

struct Scratch {
    float* row;     // [k dim], or the widest row of V
    float* q;       // [rows, k width], rotated and scaled
    float* tile;    // [TILE, width], decoded
    float* turned;  // [2 W, k width], transposed keys
    float* scores;  // [rows, TILE], then weights
    Running running;
    Partial run;    // of the current split
    Partial sum;    // of all splits before it
    IntegerScratch k, v;
    MeansScratch means;
    ChannelScratch channels;
};

// The keys of a tile that are read, and those that are prefetched.
struct Read {
    int at, skip, keys, next_keys;  // the keys [skip, keys) of those from position `at` on
    bool is_first;                  // of a split
    int first_block;                // of the span that contains the tile
    Cursor here, there;
};

inline void read_queries(const Call& call, const Task& task, Scratch& scratch) {
    const KvqRows& k = call.layer.k;
    for (int r = 0; r < task.rows; r++) {
        float* x = scratch.row;
        read_floats(x, row_of(call, task, call.q, r), k.dim, call.q.code);
        if (k.rotated) rotate(x, k.dim);
        float bad = 0;
        for (int i = 0; i < k.dim; i++) bad += x[i] * 0.0f;
        if (bad != 0)  // a value is not finite: the result must not be, either
            for (int i = 0; i < k.dim; i++) x[i] = __builtin_nanf("");
        for (int i = k.dim; i < call.k_width; i++) x[i] = 0;
        const Means& means = call.k_means;
        float scale = call.options.scale;
        if (call.k_integer) read_integer_query(scratch.k, call.k_cut, r, task.rows, x, k.dim, scale);
        if (means.is_integer) read_integer_query(scratch.means.k, means.cut, r, task.rows, x, k.dim, scale);
        if (call.k_integer && (!means.rows || means.is_integer)) continue;
        float* q = scratch.q + (int64_t)r * call.k_width;
        for (int i = 0; i < call.k_width; i++) q[i] = x[i] * scale;
        if (call.k_channels && call.channel_cut.is_paired) order_channels(q, k.dim);
    }
}

// Compute the scores of a tile's keys in scratch.scores.
inline void score_tile(const Call& call, const Task& task, Scratch& scratch, const Read& read) {
    const KvqRows& rows = call.layer.k;
    if (call.k_integer) {
        read_integer_tile(scratch.k, rows, call.k_cut, task.head, read.is_first, read.here, read.there, read.skip,
                          read.keys, read.next_keys);
        integer_keys(scratch.k, call.k_cut, scratch.scores, task.rows, read.keys);
    } else if (call.k_channels) {
        prefetch_channels(rows, read.there, task.head, read.next_keys);
        channel_tile(scratch.scores, scratch.channels, call.channel_cut, rows, task.head, scratch.q, call.k_width,
                     task.rows, read.here, read.skip, read.keys);
    } else if (read.skip == 0 && lies_as_tile(call.layer, rows)) {
        prefetch_rows(rows, read.there, task.head, read.next_keys);
        scores_in_place(scratch.scores, scratch.q, task.rows, rows, read.here, task.head, read.keys, scratch.turned);
    } else {
        read_tile(scratch.tile, rows, read.here, read.there, task.head, call.k_width, read.skip, read.keys,
                  read.next_keys);
        all_float_scores(scratch.scores, scratch.q, task.rows, scratch.tile, call.k_width, read.keys, scratch.turned);
    }
    if (!rows.means) return;
    TileBlocks blocks(read.at, call.layer.block_size, read.skip, read.keys);
    add_scores(scratch.scores, scratch.means.scores + blocks.first - read.first_block, task.rows, blocks);
}

// Add a tile's values to scratch.run.out, and its weights to scratch.means.
inline void add_tile(const Call& call, const Task& task, Scratch& scratch, const Read& read) {
    const KvqRows& rows = call.layer.v;
    const float* decays = scratch.running.decays;
    if (call.v_integer) {
        read_integer_tile(scratch.v, rows, call.v_cut, task.head, read.is_first, read.here, read.there, read.skip,
                          read.keys, read.next_keys);
        integer_values(scratch.v, call.v_cut, scratch.run.out, call.v_width, decays, scratch.scores, task.rows);
    } else if (read.skip == 0 && lies_as_tile(call.layer, rows)) {
        prefetch_rows(rows, read.there, task.head, read.next_keys);
        values_in_place(scratch.run.out, decays, scratch.scores, task.rows, rows, read.here, task.head, read.keys);
    } else {
        read_tile(scratch.tile, rows, read.here, read.there, task.head, call.v_width, read.skip, read.keys,
                  read.next_keys);
        all_float_values(scratch.run.out, decays, scratch.scores, task.rows, scratch.tile, call.v_width, read.skip,
                         read.keys);
    }
    if (!rows.means) return;
    TileBlocks blocks(read.at, call.layer.block_size, read.skip, read.keys);
    take_block_weights(scratch.means, scratch.scores, decays, task.rows, blocks, read.first_block);
}

inline void start_split(const Call& call, const Task& task, const Scratch& scratch) {
    start(scratch.run, task.rows, call.v_width);
    memset(scratch.running.totals, 0, (size_t)task.rows * W * 4);
    if (call.v_integer) start_values(scratch.v, call.v_cut, task.rows);
    if (call.v_means.rows) start_means(scratch.means, call.v_means, task.rows);
}

inline void end_split(const Call& call, const Task& task, const Scratch& scratch) {
    for (int r = 0; r < task.rows; r++) scratch.run.total[r] = sum(load(scratch.running.totals + r * W));
    if (call.v_integer) end_values(scratch.v, call.v_cut, scratch.run.out, call.v_width, task.rows);
    const Means& means = call.v_means;
    if (!means.rows) return;
    if (means.is_integer) end_values(scratch.means.v, means.cut, scratch.means.out, means.width, task.rows);
    for (int r = 0; r < task.rows; r++) {
        const float* from = scratch.means.out + (int64_t)r * means.width;
        float* to = scratch.run.out + (int64_t)r * call.v_width;
        if (call.v_means_lie_alike)
            for (int i = 0; i < call.v_width; i += W) store(to + i, load(to + i) + load(from + i));
        else
            for (int i = 0; i < means.rows->dim; i++)
                to[place_of_value(call, i)] += from[means.is_integer ? means.cut.index[i] : i];
    }
}

// For the blocks of a tile at `at`.
KVQ_PREFETCHES void ask_for_means(const Call& call, const Task& task, int at, int high) {
    if (at >= high || (!call.k_means.rows && !call.v_means.rows)) return;
    int keys = high - at < TILE ? high - at : TILE;
    Cursor there(call.layer, call.batch, task.sequence, at);
    prefetch_means(call.k_means, there, task.head, keys);
    prefetch_means(call.v_means, there, task.head, keys);
}

inline void start_span(const Call& call, const Task& task, Scratch& scratch, const SpanBlocks& blocks) {
    if (call.k_means.rows)
        score_means(scratch.means, call.k_means, scratch.q, call.k_width, task.rows, call.batch, task.sequence,
                    task.head, blocks);
    if (call.v_means.rows) start_weights(scratch.means, task.rows);
}

inline void end_span(const Call& call, const Task& task, Scratch& scratch, const SpanBlocks& blocks) {
    if (call.v_means.rows)
        add_means(scratch.means, call.v_means, task.rows, call.batch, task.sequence, task.head, blocks);
}

// Compute attention of a task's rows over one split in scratch.run.
inline void run_split(const Call& call, const Task& task, Scratch& scratch, int split) {
    start_split(call, task, scratch);
    Seen seen = seen_by(call, task);
    int begin = split * SPLIT, end = begin + SPLIT < seen.high ? begin + SPLIT : seen.high;
    if (seen.low > begin) begin = seen.low < end ? seen.low / TILE * TILE : end;  // older blocks may be gone
    const int size = call.layer.block_size, span = span_of(size);
    for (int at = begin; at < end; at += TILE) {
        int keys = end - at < TILE ? end - at : TILE, skip = seen.low > at ? seen.low - at : 0;
        int next = at + TILE;  // the tile to prefetch; after the last tile, that tile again
        if (next >= seen.high) next = at + skip;
        int next_keys = seen.high - next < TILE ? seen.high - next : TILE;
        Read read = {at, skip, keys, next_keys, at == begin, at / span * span / size,
                     Cursor(call.layer, call.batch, task.sequence, at + skip),
                     Cursor(call.layer, call.batch, task.sequence, next)};
        ask_for_means(call, task, at + span, seen.high);
        if (at == begin || at % span == 0) start_span(call, task, scratch, SpanBlocks(at, size, seen.low, seen.high));
        score_tile(call, task, scratch, read);
        weigh_tile(call, task, scratch.scores, scratch.run, scratch.running, at, skip, keys);
        add_tile(call, task, scratch, read);
        if (at + keys == end || (at + TILE) % span == 0)
            end_span(call, task, scratch, SpanBlocks(at, size, seen.low, seen.high));
    }
    end_split(call, task, scratch);
}

// Prefetch the first tile that a few query rows will read, while the rows before them are computed.
KVQ_PREFETCHES void ask_for_first(const Call& call, const Task& task, int split) {
    constexpr int FEW = 8;
    if (task.rows > FEW) return;
    Seen seen = seen_by(call, task);
    int begin = (split < 0 ? task.first : split) * SPLIT;
    if (seen.low > begin) begin = seen.low;
    Cursor there(call.layer, call.batch, task.sequence, begin);
    for (int i = begin; i < seen.high && i < begin + TILE; i++, there.skip(1)) {
        prefetch_row(call.layer.k, *there.entry, task.head, there.offset);
        prefetch_row(call.layer.v, *there.entry, task.head, there.offset);
    }
}

inline Scratch take_scratch(const Call& call, Memory& memory) {
    Scratch s;
    int width = call.k_width > call.v_width ? call.k_width : call.v_width;
    s.row = memory.take<float>(width);
    s.q = memory.take<float>((int64_t)call.rows * call.k_width);
    s.tile = memory.take<float>((int64_t)TILE * width);
    s.turned = memory.take<float>((int64_t)2 * W * call.k_width);
    s.scores = memory.take<float>((int64_t)call.rows * TILE);
    s.running.decays = memory.take<float>(call.rows);
    s.running.totals = memory.take<float>((int64_t)call.rows * W);
    s.run = take_partial(call, call.rows, memory);
    s.sum = take_partial(call, call.rows, memory);
    s.k = take_integer_scratch(call.k_cut, call.rows, memory);
    s.v = take_integer_scratch(call.v_cut, call.rows, memory);
    s.means = take_means(call.k_means, call.v_means, call.rows, memory);
    s.channels = take_channels(call.channel_cut, call.rows, memory);
    return s;
}

// The functions that work.h calls.
struct Attend {
    typedef ::Scratch Scratch;
    static Scratch take(const Call& call, Memory& memory) { return take_scratch(call, memory); }
    static void read(const Call& call, const Task& task, Scratch& scratch) { read_queries(call, task, scratch); }
    static void ask(const Call& call, const Task& task, int split) { ask_for_first(call, task, split); }
    static void run(const Call& call, const Task& task, Scratch& scratch, int split) {
        run_split(call, task, scratch, split);
    }
};

}  // namespace

KVQ_KERNEL(attend)(const KvqLayer* layer, const KvqDense* q, const KvqDense* out, float* lse, const KvqBatch* batch,
                   const KvqAttention* options) {
    Call call = {*layer, *q, *out, lse, *batch, *options, options->q_heads / layer->kv_heads, 1,
                 padded(layer->k.dim), padded(layer->v.dim), false, false, {}, {}, {}, {}, false, 1, ROWS, false, {}};
    if (!blocks_exist(call)) return KVQ_BAD_BLOCK;
    call.k_channels = !options->exact && takes_channels(layer->k, layer->block_size);
    if (call.k_channels) call.channel_cut = channel_cut(layer->k);
    call.k_integer = !options->exact && takes_integers(layer->k);
    call.v_integer = !options->exact && takes_integers(layer->v);
    if (call.k_integer) call.k_cut = keys_cut(layer->k);
    if (call.v_integer) call.v_cut = values_cut(layer->v), call.v_width = call.v_cut.cut.width;
    call.k_means = means_of(layer->k, options->exact, keys_cut);
    call.v_means = means_of(layer->v, options->exact, values_cut);
    call.v_means_lie_alike = lie_alike(call);
    return run_plan<Attend>(call);
}
