// All decoder layers of a step in one call, each with the results of decoder.cpp, write_kv and attend: waiting threads
// find the next work before they fall asleep.

#include <time.h>

#include "../native/pool.h"
#include "../native/rowwise.h"

namespace {

inline double now_s() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// Compute queries, keys and values of a layer's inputs `x` [rows, hidden] in step.heads; write keys and values to
// blocks. The time in write_kv is added to `seconds`.
inline int begin_layer(const KvqStackLayer& l, int index, const KvqStackStep& step, const uint8_t* x, uint8_t* bad,
                       double* seconds, int code, int64_t rows, int threads) {
    const KvqDecoder& d = *l.decoder;
    int status = KVQ_CALL(decoder_in)(&d, step.adapters, index, x, step.cos[l.angles], step.sin[l.angles], step.heads, code, rows, threads);
    if (status) return status;
    int64_t head = (int64_t)d.dim * bytes_of(code), row = (d.q_heads + 2 * (int64_t)d.kv_heads) * head;
    KvqDense k = {step.heads + d.q_heads * head, row, head, code}, v = k;
    v.data += d.kv_heads * head;
    double began = now_s();
    const KvqLayer* written = l.recent ? l.recent : l.kv;
    status = KVQ_CALL(write_kv)(written, &k, &v, step.slots[l.recent ? l.recent_group : l.group], rows, step.bad, threads);
    for (int64_t t = 0; !status && t < rows; t++) bad[t] |= step.bad[t];
    if (!status && l.recent && l.sees_old && step.num_moves[l.group])
        status = KVQ_CALL(seal)(l.recent, l.kv, l.sinks, step.moves[l.group], step.num_moves[l.group], threads);
    *seconds += now_s() - began;
    return status;
}

// Return whether any query of a step sees old keys.
inline bool sees_old(const KvqStackLayer& l, const KvqBatch& batch) {
    const KvqAttention& a = l.attention;
    for (int s = 0; s < batch.sequences; s++)
        if (batch.query_lens[s] && batch.context_lens[s] - a.recent >= a.edge_size) return true;
    return false;
}

// One part of a staged layer's keys. `lens`: new tokens of every sequence, if not the batch's.
inline int attend_part(const KvqStackLayer& l, const KvqStackStep& step, const KvqLayer* kv, int group, const int32_t* lens,
                       const KvqDense& q, const KvqDense& out, float* lse, const KvqAttention& options) {
    KvqBatch batch = step.batches[group];
    if (lens) batch.query_lens = lens;
    return KVQ_CALL(attend)(kv, &q, &out, lse, &batch, &options);
}

// Attend over a layer's keys, in all parts in which they are stored; the result has `rows` rows in `code`.
inline int attend_all(const KvqStackLayer& l, const KvqStackStep& step, const int32_t* lens, const KvqDense& q,
                      int code, int64_t rows, int threads) {
    const KvqDecoder& d = *l.decoder;
    int64_t head = (int64_t)d.dim * bytes_of(code);
    KvqDense whole = {step.attended, d.q_heads * head, head, code};
    KvqAttention options = l.attention;
    options.threads = threads;
    if (!l.recent) return attend_part(l, step, l.kv, l.group, lens, q, whole, step.lse, options);
    bool old = l.sees_old && sees_old(l, step.batches[l.group]), only_young = !l.sees_old || (!old && !options.sinks);
    KvqAttention young = options;
    young.part = l.sees_old ? KVQ_YOUNG : KVQ_ALL;
    if (only_young) return attend_part(l, step, l.recent, l.recent_group, lens, q, whole, step.lse, young);
    const float* logits = options.sinks;
    options.sinks = young.sinks = nullptr;  // they join once, at the end
    KvqDense part = {nullptr, (int64_t)d.q_heads * d.dim * 4, (int64_t)d.dim * 4, KVQ_FP32};
    float* lse = step.part_lse;
    int count = 0, status = KVQ_OK;
    auto add = [&](const KvqLayer* kv, int group, const KvqAttention& asked) {
        part.data = (uint8_t*)(step.parts + count * rows * d.q_heads * d.dim);
        if (!status) status = attend_part(l, step, kv, group, lens, q, part, lse + count * rows * d.q_heads, asked);
        count++;
    };
    add(l.kv, l.group, options);
    add(l.recent, l.recent_group, young);
    if (l.sinks) {
        options.last = options.first, options.first = 0;
        add(l.sinks, l.sinks_group, options);
    }
    if (status) return status;
    return KVQ_CALL(merge_partials)(step.parts, lse, logits, step.attended, step.lse, code, count, rows * d.q_heads,
                                    d.q_heads, d.dim, threads);
}

// Compute the layer's output `out` from its inputs and the queries of `rows` rows; `lens`: queries of every sequence,
// or null for all of its new tokens.
inline int end_layer(const KvqStackLayer& l, int index, const KvqStackStep& step, const KvqAdapters* adapters,
                     const int32_t* lens, const uint8_t* x, uint8_t* out, double* seconds, int code, int64_t rows, int threads) {
    const KvqDecoder& d = *l.decoder;
    int64_t head = (int64_t)d.dim * bytes_of(code), row = (d.q_heads + 2 * (int64_t)d.kv_heads) * head;
    double began = now_s();
    int status = attend_all(l, step, lens, {step.heads, row, head, code}, code, rows, threads);
    *seconds += now_s() - began;
    return status ? status : KVQ_CALL(decoder_out)(&d, adapters, index, x, step.attended, out, code, rows, threads);
}

}  // namespace

// Compute the layers' output `out` from `x` [rows, hidden], both of `code`; tokens whose keys or values were not finite
// are flagged in `bad` [rows]. The time in write_kv and attend is added to `seconds`.
KVQ_KERNEL(decoder_stack)(const KvqStackLayer* layers, int count, const KvqStackStep* step, const uint8_t* x,
                          uint8_t* out, uint8_t* bad, double* seconds, int code, int64_t rows, int threads) {
    return carry_on(threads, [=] {
        const uint8_t* from = x;
        for (int i = 0; i < count; i++, from = out) {
            const KvqStackLayer& l = layers[i];
            int status = begin_layer(l, i, *step, from, bad, seconds, code, rows, threads);
            if (!status) status = end_layer(l, i, *step, step->adapters, nullptr, from, out, seconds, code, rows, threads);
            if (status) return status;
        }
        return (int)KVQ_OK;
    });
}

namespace {

inline bool are_below(const int64_t* numbers, int64_t count, int64_t end) {
    for (int64_t i = 0; i < count; i++)
        if (numbers[i] < 0 || numbers[i] >= end) return false;
    return true;
}

// Copy some rows, `stride` bytes apart, to rows side by side. Within one buffer, their numbers must increase.
inline void take_rows(uint8_t* out, const uint8_t* from, const int64_t* rows, int64_t count, int64_t bytes,
                      int64_t stride) {
    for (int64_t i = 0; i < count; i++) memmove(out + i * bytes, from + rows[i] * stride, (size_t)bytes);
}

// Return true if every wanted row is its sequence's last one; `lens` is then each sequence's number of wanted rows.
inline bool are_last(const KvqPass& p, const KvqBatch& batch, int64_t rows) {
    if (batch.sequences > rows) return false;
    int64_t end = 0, found = 0;
    for (int s = 0; s < batch.sequences; s++) {
        end += batch.query_lens[s];
        p.lens[s] = batch.query_lens[s] && found < p.num_wanted && p.wanted[found] == end - 1;
        found += p.lens[s];
    }
    return found == p.num_wanted;
}

// Run the last layer, whose results are needed only for the wanted rows: `x` gets these, from `from` [rows, hidden].
inline int run_last(const KvqStackLayer& l, int index, const KvqStackStep& step, const KvqPass& p, const uint8_t* from, uint8_t* x,
                    uint8_t* bad, double* seconds, int code, int64_t rows, int threads) {
    int status = begin_layer(l, index, step, from, bad, seconds, code, rows, threads);
    if (status || !p.num_wanted) return status;
    const KvqDecoder& d = *l.decoder;
    int64_t heads = d.qkv->out_features * bytes_of(code), hidden = p.head->in_features * bytes_of(code);
    take_rows(step.heads, step.heads, p.wanted, p.num_wanted, heads, heads);
    take_rows(x, from, p.wanted, p.num_wanted, hidden, hidden);
    KvqAdapters own = step.adapters ? *step.adapters : KvqAdapters{};
    own.chosen = own.wanted;
    return end_layer(l, index, step, step.adapters ? &own : nullptr, p.lens, x, x, seconds, code, p.num_wanted, threads);
}

// Look up the rows of the tokens, [rows, hidden] in p.x.
inline int embed(const KvqPass& p, int code, int64_t rows, int threads) {
    int64_t hidden = p.head->in_features, row = hidden * bytes_of(code);
    int status = KVQ_OK;
    if (p.embedding)
        take_rows(p.x, p.embedding, p.tokens, rows, row, row);
    else
        status = KVQ_CALL(linear_rows)(p.looked_up, p.tokens, rows, p.x, code, threads);
    if (status || p.scale == 1.0f) return status;
    if (rows * hidden < WORTH_THREADS) threads = 1;
    run_even(threads, rows, [&, row](int64_t i) { scale_by(p.x + i * row, p.scale, hidden, code); });
    return KVQ_OK;
}

inline int run_pass(KvqWholeStep& w) {
    const KvqStackStep& step = *w.step;
    const KvqPass& p = *w.pass;
    int64_t rows = w.rows;
    int code = w.code, threads = w.threads;
    if (!are_below(p.tokens, rows, p.vocab) || !are_below(p.positions, rows, p.num_positions) ||
        !are_below(p.wanted, p.num_wanted, rows))
        return KVQ_BAD_ROW;
    int64_t hidden = p.head->in_features, row = hidden * bytes_of(code), angle = (int64_t)p.dim * bytes_of(code);
    int status = embed(p, code, rows, threads);
    for (int i = 0; i < p.kinds; i++) {
        uint8_t* own = p.angles + 2 * i * rows * angle;
        step.cos[i] = own, step.sin[i] = own + rows * angle;
        take_rows(own, p.cos[i], p.positions, rows, angle, angle);
        take_rows(own + rows * angle, p.sin[i], p.positions, rows, angle, angle);
    }
    const KvqStackLayer& last = w.layers[w.count - 1];
    bool few = w.count > 1 && p.num_wanted < rows && are_last(p, step.batches[last.group], rows);
    if (!status)
        status = KVQ_CALL(decoder_stack)(w.layers, w.count - few, &step, p.x, p.out, w.bad, &w.seconds, code, rows, threads);
    if (!status && few) status = run_last(last, w.count - 1, step, p, p.out, p.x, w.bad, &w.seconds, code, rows, threads);
    if (status || !p.num_wanted) return status;
    if (!few) take_rows(p.x, p.out, p.wanted, p.num_wanted, row, row);
    KvqAround around = {&p.norm, 0, 0, nullptr, nullptr, 0};
    int64_t out_row = p.head->out_features * bytes_of(code);
    return KVQ_CALL(linear_around)(p.head, &around, p.x, row, w.logits, out_row, code, p.num_wanted, threads);
}

inline void run_whole(const void* step) {
    KvqWholeStep& w = *(KvqWholeStep*)step;
    double began = now_s();
    w.status = run_pass(w);
    w.took = now_s() - began;
}

}  // namespace

// A whole step, with the results of decoder_stack and the operations around it. Rows that are not wanted get no result
// of the last layer.
KVQ_KERNEL(decoder_pass)(KvqWholeStep* step) {
    kvq_carry_on(step->threads, run_whole, step);
    return step->status;
}

// The same in two calls: begin the step, then wait once for its end. Its arguments must stay valid until then.
KVQ_KERNEL(decoder_pass_begin)(KvqWholeStep* step) {
    step->number = kvq_set_off(step->threads, run_whole, step);
    return KVQ_OK;
}

KVQ_KERNEL(decoder_pass_end)(KvqWholeStep* step) {
    kvq_see_through(step->number);
    step->number = 0;
    return step->status;
}
