// All decoder layers of a step in one call, each as decoder.cpp, write_kv and attend give it: threads that wait find
// the next work before they fall asleep.

#include <time.h>

#include "../native/rows.h"

namespace {

inline double now_s() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

}  // namespace

// `x` [rows, hidden] becomes the layers' result in `out`, both of `code`; tokens whose keys or values were not finite
// are flagged in `bad` [rows]. `seconds`: those in write_kv and attend are added to it.
KVQ_KERNEL(decoder_stack)(const KvqStackLayer* layers, int count, const KvqStackStep* step, const uint8_t* x,
                          uint8_t* out, uint8_t* bad, double* seconds, int code, int64_t rows, int threads) {
    for (int i = 0; i < count; i++, x = out) {
        const KvqStackLayer& l = layers[i];
        const KvqDecoder& d = *l.decoder;
        int status = KVQ_CALL(decoder_in)(&d, x, step->cos[l.angles], step->sin[l.angles], step->heads, code, rows, threads);
        if (status) return status;
        int64_t head = (int64_t)d.dim * bytes_of(code), row = (d.q_heads + 2 * (int64_t)d.kv_heads) * head;
        KvqDense q = {step->heads, row, head, code}, k = q, v = q;
        k.data += d.q_heads * head, v.data += (d.q_heads + d.kv_heads) * head;
        KvqDense attended = {step->attended, d.q_heads * head, head, code};
        double began = now_s();
        status = KVQ_CALL(write_kv)(l.kv, &k, &v, step->slots[l.group], rows, step->bad, threads);
        if (status) return status;
        for (int64_t t = 0; t < rows; t++) bad[t] |= step->bad[t];
        KvqAttention options = l.attention;
        options.threads = threads;
        status = KVQ_CALL(attend)(l.kv, &q, &attended, step->lse, step->batches + l.group, &options);
        if (status) return status;
        *seconds += now_s() - began;
        status = KVQ_CALL(decoder_out)(&d, x, step->attended, out, code, rows, threads);
        if (status) return status;
    }
    return KVQ_OK;
}

namespace {

inline bool are_below(const int64_t* numbers, int64_t count, int64_t end) {
    for (int64_t i = 0; i < count; i++)
        if (numbers[i] < 0 || numbers[i] >= end) return false;
    return true;
}

inline void take_rows(uint8_t* out, const uint8_t* from, const int64_t* rows, int64_t count, int64_t bytes) {
    for (int64_t i = 0; i < count; i++) memcpy(out + i * bytes, from + rows[i] * bytes, (size_t)bytes);
}

}  // namespace

// A whole step: `logits` [wanted, vocab] of `code` from token ids and positions, as decoder_stack and the operations
// around it give them.
KVQ_KERNEL(decoder_pass)(const KvqStackLayer* layers, int count, const KvqStackStep* step, const KvqPass* pass,
                         uint8_t* logits, uint8_t* bad, double* seconds, int code, int64_t rows, int threads) {
    const KvqPass& p = *pass;
    if (!are_below(p.tokens, rows, p.vocab) || !are_below(p.positions, rows, p.num_positions) ||
        !are_below(p.wanted, p.num_wanted, rows))
        return KVQ_BAD_ROW;
    int64_t hidden = p.head->in_features, row = hidden * bytes_of(code), angle = (int64_t)p.dim * bytes_of(code);
    if (p.embedding) take_rows(p.x, p.embedding, p.tokens, rows, row);
    if (int status = p.embedding ? KVQ_OK : KVQ_CALL(linear_rows)(p.looked_up, p.tokens, rows, p.x, code, threads))
        return status;
    for (int i = 0; i < p.kinds; i++) {
        uint8_t* own = p.angles + 2 * i * rows * angle;
        step->cos[i] = own, step->sin[i] = own + rows * angle;
        take_rows(own, p.cos[i], p.positions, rows, angle);
        take_rows(own + rows * angle, p.sin[i], p.positions, rows, angle);
    }
    int status = KVQ_CALL(decoder_stack)(layers, count, step, p.x, p.out, bad, seconds, code, rows, threads);
    if (status) return status;
    take_rows(p.x, p.out, p.wanted, p.num_wanted, row);
    KVQ_CALL(rms_norm)(p.x, p.norm.weight, p.normed, hidden, code, p.norm.code, p.norm.eps, p.num_wanted, threads);
    return KVQ_CALL(linear)(p.head, p.normed, row, logits, p.head->out_features * bytes_of(code), code, p.num_wanted, threads);
}
