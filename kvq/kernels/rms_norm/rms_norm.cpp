// rms_norm on CPUs: see reference.py. A task is a row; squares are summed lane by lane, so rows are alike.

#include "../native/rowwise.h"

namespace {

// Elements from `first` on as floats, zeros behind the end; how many there are.
inline int read_piece(float* out, const uint8_t* x, int64_t first, int64_t dim, int code) {
    int n = (int)(dim - first < PIECE ? dim - first : PIECE);
    read_padded(out, x + first * bytes_of(code), n, code);
    return n;
}

inline void normalize(uint8_t* out, const uint8_t* x, const uint8_t* weight, int64_t dim, int code, int weight_code,
                      float eps) {
    float a[PIECE], b[PIECE];
    vf squares = {};
    for (int64_t first = 0; first < dim; first += PIECE) {
        int n = read_piece(a, x, first, dim, code);
        for (int i = 0; i < n; i += W) squares += load(a + i) * load(a + i);
    }
    float factor = 1.0f / __builtin_sqrtf(sum(squares) / (float)dim + eps);
    for (int64_t first = 0; first < dim; first += PIECE) {
        int n = read_piece(a, x, first, dim, code);
        read_piece(b, weight, first, dim, weight_code);
        for (int i = 0; i < n; i += W) store(a + i, load(a + i) * factor * load(b + i));
        write_floats(out + first * bytes_of(code), a, n, code);
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
