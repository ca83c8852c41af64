// A plain decoder layer on CPUs but for its attention: what comes before it in one call, what follows in another.

#include "../native/rowwise.h"

namespace {

// out += x, row by row; `x_row` 0 adds the same to all.
inline void add_rows(uint8_t* out, const uint8_t* x, int64_t x_row, int64_t dim, int code, int64_t rows, int threads) {
    int64_t size = bytes_of(code);
    if (rows * dim < WORTH_THREADS) threads = 1;
    run_even(threads, rows, [=](int64_t row) {
        for (int64_t first = 0; first < dim; first += PIECE) {
            int n = (int)(dim - first < PIECE ? dim - first : PIECE);
            float room[2][PIECE];
            uint8_t* to = out + (row * dim + first) * size;
            const float *a = floats_at(room[0], to, n, code), *b = floats_at(room[1], x + row * x_row + first * size, n, code);
            float* sums = results_at(room[0], to, n, code);
            for (int i = 0; i < n; i += W) store(sums + i, load(a + i) + load(b + i));
            settle(to, sums, n, code);
        }
    });
}

inline void normalize(const KvqNorm& norm, const uint8_t* x, uint8_t* out, int64_t dim, int code, int64_t rows,
                      int threads) {
    KVQ_CALL(rms_norm)(x, norm.weight, out, dim, code, norm.code, norm.eps, rows, threads);
}

// Heads of queries and keys by their own norms, where a family has them.
inline void normalize_heads(const KvqDecoder& l, uint8_t* heads, int64_t row_bytes, int code, int64_t rows,
                            int threads) {
    int64_t keys = (int64_t)l.q_heads * l.dim * bytes_of(code);
    if (rows * (l.q_heads + l.kv_heads) * l.dim < WORTH_THREADS) threads = 1;
    run_even(threads, rows, [=, &l](int64_t row) {
        uint8_t* at = heads + row * row_bytes;
        normalize(l.q_norm, at, at, l.dim, code, l.q_heads, 1);
        normalize(l.k_norm, at + keys, at + keys, l.dim, code, l.kv_heads, 1);
    });
}

}  // namespace

// Queries, keys and values of `x` [rows, hidden]: `out` [rows, (q_heads + 2 kv_heads) dim], queries and keys turned
// by the angles `cos` and `sin` [rows, dim]; all of `code`.
KVQ_KERNEL(decoder_in)(const KvqDecoder* layer, const uint8_t* x, const uint8_t* cos, const uint8_t* sin,
                       uint8_t* out, int code, int64_t rows, int threads) {
    const KvqDecoder& l = *layer;
    int64_t size = bytes_of(code), x_row = l.qkv->in_features * size, out_row = l.qkv->out_features * size;
    int64_t angles = l.dim * size;
    return run_rows(rows, x_row, [&](uint8_t* normed, int64_t first, int64_t n) {
        uint8_t* heads = out + first * out_row;
        normalize(l.input_norm, x + first * x_row, normed, l.qkv->in_features, code, n, threads);
        int status = KVQ_CALL(linear)(l.qkv, normed, x_row, heads, out_row, code, n, threads);
        if (status) return status;
        if (l.qkv_bias) add_rows(heads, l.qkv_bias, 0, l.qkv->out_features, code, n, threads);
        if (l.q_norm.weight) normalize_heads(l, heads, out_row, code, n, threads);
        return KVQ_CALL(rope)(heads, out_row, cos + first * angles, sin + first * angles, l.q_heads + l.kv_heads,
                              l.dim / 2, code, n, threads);
    });
}

// The layer's result `out` from its inputs `x` [rows, hidden] and `attended` [rows, q_heads dim]; all of `code`.
KVQ_KERNEL(decoder_out)(const KvqDecoder* layer, const uint8_t* x, const uint8_t* attended, uint8_t* out, int code,
                        int64_t rows, int threads) {
    const KvqDecoder& l = *layer;
    int64_t size = bytes_of(code), hidden = l.output->out_features, row_bytes = hidden * size;
    int64_t attended_row = l.output->in_features * size;
    return run_rows(rows, 2 * row_bytes, [&](uint8_t* added, int64_t first, int64_t n) {
        uint8_t *normed = added + n * row_bytes, *to = out + first * row_bytes;
        int status = KVQ_CALL(linear)(l.output, attended + first * attended_row, attended_row, added, row_bytes, code,
                                      n, threads);
        if (status) return status;
        if (l.output_bias) add_rows(added, l.output_bias, 0, hidden, code, n, threads);
        add_rows(added, x + first * row_bytes, row_bytes, hidden, code, n, threads);
        normalize(l.output_norm, added, normed, hidden, code, n, threads);
        status = KVQ_CALL(linear_mlp)(l.gate_up, l.down, normed, row_bytes, to, row_bytes, code, l.activation, n,
                                      threads);
        if (!status) add_rows(to, added, row_bytes, hidden, code, n, threads);
        return status;
    });
}
