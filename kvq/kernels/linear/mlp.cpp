// A gated MLP in one call: down(activation(gate(x)) * up(x)), with gate and up joined in one weight.

#include "gates.h"

// `x` [rows, 2 n]: gates, then gated values; `out` [rows, n], which may be the same memory as the gates.
KVQ_KERNEL(gated)(const uint8_t* x, int64_t x_row, uint8_t* out, int64_t out_row, int64_t n, int code,
                  int activation, int64_t rows, int threads) {
    int64_t pieces = (n + PIECE - 1) / PIECE, size = bytes_of(code);
    if (rows * n < WORTH_THREADS) threads = 1;
    run_even(threads, rows * pieces, [=](int64_t i) {
        int64_t row = i / pieces, first = i % pieces * PIECE;
        const uint8_t* from = x + row * x_row + first * size;
        gate_piece(out + row * out_row + first * size, from, from + n * size, length_of(first, n), code, activation);
    });
    return KVQ_OK;
}

// Bit for bit the same as three calls one after the other.
KVQ_KERNEL(linear_mlp)(const KvqLinear* gate_up, const KvqLinear* down, const uint8_t* x, int64_t x_row,
                       uint8_t* out, int64_t out_row, int code, int activation, int64_t rows, int threads) {
    int64_t hidden_row = gate_up->out_features * bytes_of(code);
    KvqAround gated = {nullptr, 1, activation, nullptr, nullptr, 0};
    return run_rows(rows, hidden_row, [=, &gated](uint8_t* hidden, int64_t first, int64_t n) {
        int status = KVQ_CALL(linear)(gate_up, x + first * x_row, x_row, hidden, hidden_row, code, n, threads);
        if (status) return status;
        uint8_t* to = out + first * out_row;
        return KVQ_CALL(linear_around)(down, &gated, hidden, hidden_row, to, out_row, code, n, threads);
    });
}
