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
