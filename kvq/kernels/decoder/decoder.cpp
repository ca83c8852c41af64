// A plain decoder layer on CPUs without its attention: the part before attention in one call, the rest in another.

#include "../rms_norm/normalize.h"

namespace {

// Normalize heads of queries and keys, if the family has such norms.
inline void normalize_heads(const KvqDecoder& l, uint8_t* heads, int64_t row_bytes, int code, int64_t rows,
                            int threads) {
    int64_t count = l.q_heads + l.kv_heads, size = (int64_t)l.dim * bytes_of(code);
    if (rows * count * l.dim < WORTH_THREADS) threads = 1;
    run_even(threads, rows, [=, &l](int64_t row) {
        uint8_t* at = heads + row * row_bytes;
        for (int head = 0; head < count; head++, at += size)
            normalize(at, at, head < l.q_heads ? l.q_norm : l.k_norm, l.dim, code);
    });
}

// x = added + norm(x) for each row; the norm is rounded first, as in separate operations.
inline void normalize_and_add(const KvqNorm& norm, uint8_t* x, const uint8_t* added, int64_t dim, int code,
                              int64_t rows, int threads) {
    int64_t row = dim * bytes_of(code);
    if (rows * dim < WORTH_THREADS) threads = 1;
    run_even(threads, rows, [=, &norm](int64_t i) {
        normalize(x + i * row, x + i * row, norm, dim, code);
        add_to(x + i * row, added + i * row, dim, code);
    });
}

// Add the updates of the rows' adapters to a product's results for rows [first, first + n).
inline int adapt(const KvqAdapters* a, int index, const KvqFactors* KvqLayerFactors::*product, const KvqAround& around,
                 const uint8_t* x, int64_t x_row, uint8_t* out, int64_t out_row, int code, int64_t first, int64_t n,
                 int threads) {
    if (!a) return KVQ_OK;
    KvqChosen chosen[MOST_ROWS];
    for (int64_t r = 0; r < n; r++) {
        int own = a->chosen[first + r];
        chosen[r].factors = own < 0 ? nullptr : a->adapters[own].layers[index].*product;
    }
    return KVQ_CALL(adapters)(chosen, &around, x, x_row, out, out_row, code, n, threads);
}

}  // namespace

// Compute queries, keys and values of `x` [rows, hidden] in `out` [rows, (q_heads + 2 kv_heads) dim], with RoPE by
// the angles `cos` and `sin` [rows, dim]; all of `code`. The layer is number `index` of each of the adapters, if any.
KVQ_KERNEL(decoder_in)(const KvqDecoder* layer, const KvqAdapters* adapters, int index, const uint8_t* x,
                       const uint8_t* cos, const uint8_t* sin, uint8_t* out, int code, int64_t rows, int threads) {
    const KvqDecoder& l = *layer;
    int64_t size = bytes_of(code), x_row = l.qkv->in_features * size, out_row = l.qkv->out_features * size;
    int64_t angles = l.dim * size;
    KvqAround around = {&l.input_norm, 0, 0, l.qkv_bias, nullptr, 0};
    return in_turn(rows, [&](int64_t first, int64_t n) {
        uint8_t* heads = out + first * out_row;
        int status = KVQ_CALL(linear_around)(l.qkv, &around, x + first * x_row, x_row, heads, out_row, code, n,
                                             threads);
        if (!status)
            status = adapt(adapters, index, &KvqLayerFactors::qkv, around, x + first * x_row, x_row, heads, out_row,
                           code, first, n, threads);
        if (status) return status;
        if (l.q_norm.weight) normalize_heads(l, heads, out_row, code, n, threads);
        return KVQ_CALL(rope)(heads, out_row, cos + first * angles, sin + first * angles, l.q_heads + l.kv_heads,
                              l.dim / 2, code, n, threads);
    });
}

// Compute the layer's output `out` from inputs `x` [rows, hidden] and `attended` [rows, q_heads dim]; all of `code`.
KVQ_KERNEL(decoder_out)(const KvqDecoder* layer, const KvqAdapters* adapters, int index, const uint8_t* x,
                        const uint8_t* attended, uint8_t* out, int code, int64_t rows, int threads) {
    const KvqDecoder& l = *layer;
    int64_t hidden = l.output->out_features, size = bytes_of(code), row = hidden * size;
    int64_t gates_row = l.gate_up->out_features * size, attended_row = l.output->in_features * size;
    return run_rows(rows, row + gates_row, [&](uint8_t* sums, int64_t first, int64_t n) {
        uint8_t *gates = sums + n * row, *to = out + first * row;
        const uint8_t* inputs = x + first * row;
        KvqAround after_attention = {nullptr, 0, 0, l.output_bias, l.attention_norm.weight ? nullptr : inputs, row};
        KvqAround before_gates = {&l.mlp_norm, 0, 0, nullptr, nullptr, 0};
        KvqAround gated = {nullptr, 1, l.activation, nullptr, l.out_norm.weight ? nullptr : sums, row};
        const uint8_t* from = attended + first * attended_row;
        auto multiply = [&](const KvqLinear* linear, const KvqFactors* KvqLayerFactors::*product, const KvqAround& around,
                            const uint8_t* inputs, int64_t inputs_row, uint8_t* results, int64_t results_row) {
            int status = KVQ_CALL(linear_around)(linear, &around, inputs, inputs_row, results, results_row, code, n,
                                                 threads);
            return status ? status : adapt(adapters, index, product, around, inputs, inputs_row, results, results_row,
                                           code, first, n, threads);
        };
        int status = multiply(l.output, &KvqLayerFactors::output, after_attention, from, attended_row, sums, row);
        if (status) return status;
        if (l.attention_norm.weight) normalize_and_add(l.attention_norm, sums, inputs, hidden, code, n, threads);
        status = multiply(l.gate_up, &KvqLayerFactors::gate_up, before_gates, sums, row, gates, gates_row);
        if (status) return status;
        status = multiply(l.down, &KvqLayerFactors::down, gated, gates, gates_row, to, row);
        if (!status && l.out_norm.weight) normalize_and_add(l.out_norm, to, sums, hidden, code, n, threads);
        return status;
    });
}
