// rms_norm on CPUs: see reference.py. A task is a row.

#include "normalize.h"

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
