// A gated MLP in one call: down(activation(gate(x)) * up(x)), with gate and up joined in one weight.

#include "gates.h"

namespace {

inline void gate_piece(uint8_t* out, const uint8_t* gate, const uint8_t* up, int n, int code, int activation) {
    float a[PIECE], b[PIECE];
    const float *x = floats_at(a, gate, n, code), *y = floats_at(b, up, n, code);
    float* to = results_at(a, out, n, code);
    for (int i = 0; i < n; i += W) store(to + i, activated(load(x + i), activation, 1.0f) * load(y + i));
    settle(out, to, n, code);
}

}  // namespace

// `x` [rows, 2 n]: gates, then what they gate; `out` [rows, n], which may be the same memory as the gates.
KVQ_KERNEL(gated)(const uint8_t* x, int64_t x_row, uint8_t* out, int64_t out_row, int64_t n, int code,
                  int activation, int64_t rows, int threads) {
    int64_t pieces = (n + PIECE - 1) / PIECE, size = bytes_of(code);
    if (rows * n < WORTH_THREADS) threads = 1;
    run_even(threads, rows * pieces, [=](int64_t i) {
        int64_t row = i / pieces, first = i % pieces * PIECE, left = n - first;
        const uint8_t* from = x + row * x_row + first * size;
        gate_piece(out + row * out_row + first * size, from, from + n * size, (int)(left < PIECE ? left : PIECE), code,
                   activation);
    });
    return KVQ_OK;
}

// Bit for bit what the three calls give one after the other.
KVQ_KERNEL(linear_mlp)(const KvqLinear* gate_up, const KvqLinear* down, const uint8_t* x, int64_t x_row,
                       uint8_t* out, int64_t out_row, int code, int activation, int64_t rows, int threads) {
    int64_t hidden_row = gate_up->out_features * bytes_of(code);
    return run_rows(rows, hidden_row, [=](uint8_t* hidden, int64_t first, int64_t n) {
        int status = KVQ_CALL(linear)(gate_up, x + first * x_row, x_row, hidden, hidden_row, code, n, threads);
        if (status) return status;
        KVQ_CALL(gated)(hidden, hidden_row, hidden, hidden_row, down->in_features, code, activation, n, threads);
        return KVQ_CALL(linear)(down, hidden, hidden_row, out + first * out_row, out_row, code, n, threads);
    });
}
