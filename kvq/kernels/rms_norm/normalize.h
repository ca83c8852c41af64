// One row of rms_norm: see reference.py. Squares are summed lane by lane, so rows are alike.
#pragma once

#include "../native/rowwise.h"

namespace {

inline void normalize(uint8_t* out, const uint8_t* x, const uint8_t* weight, int64_t dim, int code, int weight_code,
                      float eps) {
    float a[PIECE], b[PIECE], c[PIECE];
    int64_t size = bytes_of(code);
    vf squares = {};
    for (int64_t first = 0; first < dim; first += PIECE) {
        int n = length_of(first, dim);
        const float* from = floats_at(a, x + first * size, n, code);
        for (int i = 0; i < n; i += W) squares += load(from + i) * load(from + i);
    }
    float factor = 1.0f / __builtin_sqrtf(sum(squares) / (float)dim + eps);
    for (int64_t first = 0; first < dim; first += PIECE) {
        int n = length_of(first, dim);
        const float* from = floats_at(a, x + first * size, n, code);
        const float* own = floats_at(b, weight + first * bytes_of(weight_code), n, weight_code);
        float* to = results_at(c, out + first * size, n, code);
        for (int i = 0; i < n; i += W) store(to + i, load(from + i) * factor * load(own + i));
        settle(out + first * size, to, n, code);
    }
}

inline void normalize(uint8_t* out, const uint8_t* x, const KvqNorm& norm, int64_t dim, int code) {
    normalize(out, x, norm.weight, dim, code, norm.code, norm.eps);
}

}  // namespace
