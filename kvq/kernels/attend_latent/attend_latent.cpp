// attend_latent on CPUs: see reference.py for what it computes. A tile of stored rows is decoded once, as key and
// value of up to ROWS query rows; matrix products are bf16 if the CPU has tiles for them (tiles.h), else fp32. Tasks,
// splits and tiles are those of attend.

#include "tiles.h"

namespace {

struct FloatScratch {
    float* row;                // widest row that is written
    float *latent_q, *rotary_q;  // [rows, v width], [rows, k width], rotated and scaled
    float *latent, *rotary;    // [TILE, v width], [TILE, k width]
    float *latent_mean, *rotary_mean;
    float* scores;             // [rows, TILE], then weights
    Running running;
    Partial run, sum;
};

// scores [R, TILE] (+)= q [R, width] . tile [keys, width], rounded up to 4 keys; the rest is garbage.
template <int R, bool ADD>
inline void some_scores(float* scores, const float* q, const float* tile, int width, int keys) {
    for (int key = 0; key < keys; key += 4) {
        const float* k = tile + (int64_t)key * width;
        vf sums[R][4] = {};
        for (int i = 0; i < width; i += W) {
            vf x[4];
            for (int j = 0; j < 4; j++) x[j] = load(k + (int64_t)j * width + i);
            for (int r = 0; r < R; r++) {
                vf y = load(q + (int64_t)r * width + i);
                for (int j = 0; j < 4; j++) sums[r][j] += x[j] * y;
            }
        }
        for (int r = 0; r < R; r++) {
            vf four = sums_of_four(sums[r]);
            float* to = scores + r * TILE + key;
            for (int j = 0; j < 4; j++) to[j] = ADD ? to[j] + four[j] : four[j];
        }
    }
}

template <bool ADD>
inline void all_scores(float* scores, const float* q, int count, const float* tile, int width, int keys) {
    int r = 0;
    for (; r + 4 <= count; r += 4) some_scores<4, ADD>(scores + r * TILE, q + (int64_t)r * width, tile, width, keys);
    for (; r < count; r++) some_scores<1, ADD>(scores + r * TILE, q + (int64_t)r * width, tile, width, keys);
}

struct FloatLatent {
    typedef FloatScratch Scratch;

    static Scratch take(const Call& call, Memory& memory) {
        Scratch s;
        s.row = memory.take<float>(call.v_width);
        s.latent_q = memory.take<float>((int64_t)call.rows * call.v_width);
        s.rotary_q = memory.take<float>((int64_t)call.rows * call.k_width);
        s.latent = memory.take<float>((int64_t)TILE * call.v_width);
        s.rotary = memory.take<float>((int64_t)TILE * call.k_width);
        s.latent_mean = memory.take<float>(call.v_width);
        s.rotary_mean = memory.take<float>(call.k_width);
        s.scores = memory.take<float>((int64_t)call.rows * TILE);
        s.running.decays = memory.take<float>(call.rows);
        s.running.totals = memory.take<float>((int64_t)call.rows * W);
        s.run = take_partial(call, call.rows, memory);
        s.sum = take_partial(call, call.rows, memory);
        return s;
    }

    static void read(const Call& call, const Task& task, Scratch& s) {
        memset(s.latent_q, 0, (size_t)task.rows * call.v_width * 4);
        memset(s.rotary_q, 0, (size_t)task.rows * call.k_width * 4);
        for (int r = 0; r < task.rows; r++)
            read_parts(call, task, r, s.latent_q + (int64_t)r * call.v_width, s.rotary_q + (int64_t)r * call.k_width);
    }

    static void ask(const Call&, const Task&, int) {}
    static void run(const Call& call, const Task& task, Scratch& s, int split) {
        start(s.run, task.rows, call.v_width);
        memset(s.running.totals, 0, (size_t)task.rows * W * 4);
        memset(s.latent, 0, (size_t)TILE * call.v_width * 4);
        memset(s.rotary, 0, (size_t)TILE * call.k_width * 4);
        Stored latents(call.layer.v, s.latent_mean), rotary(call.layer.k, s.rotary_mean);
        for_tiles(call, task, split, [&](Span span) {
            for (int i = span.skip; i < span.keys; i++, span.here.skip(1)) {
                latents.read(s.latent + (int64_t)i * call.v_width, *span.here.entry, span.here.offset);
                rotary.read(s.rotary + (int64_t)i * call.k_width, *span.here.entry, span.here.offset);
            }
            all_scores<false>(s.scores, s.latent_q, task.rows, s.latent, call.v_width, span.keys);
            all_scores<true>(s.scores, s.rotary_q, task.rows, s.rotary, call.k_width, span.keys);
            weigh_tile(call, task, s.scores, s.run, s.running, span.at, span.skip, span.keys);
            all_float_values(s.run.out, s.running.decays, s.scores, task.rows, s.latent, call.v_width, span.skip,
                             span.keys);
        });
        for (int r = 0; r < task.rows; r++) s.run.total[r] = sum(load(s.running.totals + r * W));
    }
};

// Query rows of a task if there are enough parts of contexts for all threads: each task decodes them again.
constexpr int MANY_ROWS = 2 * ROWS;

inline int64_t parts_of(const KvqBatch& batch) {
    int64_t parts = 0;
    for (int s = 0; s < batch.sequences; s++)
        if (batch.query_lens[s]) parts += (batch.context_lens[s] + SPLIT - 1) / SPLIT;
    return parts;
}

}  // namespace

KVQ_KERNEL(attend_latent)(const KvqLayer* layer, const KvqDense* q, const KvqDense* out, float* lse,
                          const KvqBatch* batch, const KvqAttention* options) {
    Call call = {*layer, *q, *out, lse, *batch, *options, options->q_heads, 1, padded(layer->k.dim),
                 padded(layer->v.dim), false, false, {}, {}, {}, {}, false, 1, ROWS, false, {}};
    if (!blocks_exist(call)) return KVQ_BAD_BLOCK;
#if defined(KVQ_TILES)
    if (!options->exact && takes_tiles(*layer) && has_tiles()) {
        call.row_unit = TILE_ROWS;
        if (parts_of(*batch) >= 2 * (int64_t)options->threads) call.most_rows = MANY_ROWS;
        call.k_width = tile_width(layer->k.dim), call.v_width = tile_width(layer->v.dim);
        return run_plan<TileLatent>(call);
    }
#endif
    return run_plan<FloatLatent>(call);
}

// Return whether this CPU has tiles for the products of attend_latent.
KVQ_KERNEL(latent_tiles)(int* found) {
    *found = 0;
#if defined(KVQ_TILES)
    *found = has_tiles();
#endif
    return KVQ_OK;
}
