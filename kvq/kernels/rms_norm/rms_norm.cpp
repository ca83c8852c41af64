// rms_norm on CPUs: see reference.py. A task is a row; squares are summed lane by lane, so rows are alike.

#include "../native/rowwise.h"

namespace {

inline int length_of(int64_t first, int64_t dim) { return (int)(dim - first < PIECE ? dim - first : PIECE); }

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

}  // namespace

// `x` and `out` [rows, dim] of `code`, `weight` [dim] of `weight_code`.
KVQ_KERNEL(rms_norm)(const uint8_t* x, const uint8_t* weight, uint8_t* out, int64_t dim, int code, int weight_code,
                     float eps, int64_t rows, int threads) {
    int64_t row_bytes = dim * bytes_of(code);
    if (rows * dim < WORTH_THREADS) threads = 1;
    run_even(threads, rows, [=](int64_t row) {
        normalize(out + row * row_bytes, x + row * row_bytes, weight, dim, code, weight_code, eps);
    });
    return KVQ_OK;
}
