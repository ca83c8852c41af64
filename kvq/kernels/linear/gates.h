// The gating of an MLP between its products: the activation of the gates times the rest.
#pragma once

#include "../native/rowwise.h"

namespace {

// x times the logistic function of x (SiLU), or of 2 sqrt(2 / pi) (x + 0.044715 x^3) (GELU with tanh); for SiLU,
// that x is multiplied by `slope`.
inline vf activated(vf x, int activation, float slope) {
    vf y = activation == KVQ_SILU ? x * slope : (x + x * x * x * 0.044715f) * 1.5957691216057308f;
    vf e = exp_of(y < 0 ? y : -y);
    return x * ((y < 0 ? e : all(1.0f)) / (e + 1.0f));  // NaN stays NaN through x
}

inline void gate_piece(uint8_t* out, const uint8_t* gate, const uint8_t* up, int n, int code, int activation) {
    float a[PIECE], b[PIECE];
    const float *x = floats_at(a, gate, n, code), *y = floats_at(b, up, n, code);
    float* to = results_at(a, out, n, code);
    for (int i = 0; i < n; i += W) store(to + i, activated(load(x + i), activation, 1.0f) * load(y + i));
    settle(out, to, n, code);
}

// A whole row, in pieces.
inline void gate_row(uint8_t* out, const uint8_t* gate, const uint8_t* up, int64_t n, int code, int activation) {
    int64_t size = bytes_of(code);
    for (int64_t first = 0; first < n; first += PIECE)
        gate_piece(out + first * size, gate + first * size, up + first * size, length_of(first, n), code, activation);
}

}  // namespace
