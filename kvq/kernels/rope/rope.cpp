// rope on CPUs: see reference.py. A task is a row; heads lie one after the other in it.

#include "../native/rowwise.h"

namespace {

constexpr int MOST_HALF = 512;              // elements of half a head

inline void turn(uint8_t* row, const uint8_t* cos, const uint8_t* sin, int heads, int half, int code) {
    float c[2][MOST_HALF], s[2][MOST_HALF], a[MOST_HALF], b[MOST_HALF], y[MOST_HALF];
    int step = half * bytes_of(code);
    for (int i = 0; i < 2; i++) {
        read_padded(c[i], cos + i * step, half, code);
        read_padded(s[i], sin + i * step, half, code);
    }
    for (int head = 0; head < heads; head++, row += 2 * step) {
        read_padded(a, row, half, code);
        read_padded(b, row + step, half, code);
        for (int i = 0; i < half; i += W) store(y + i, load(a + i) * load(c[0] + i) - load(b + i) * load(s[0] + i));
        write_floats(row, y, half, code);
        for (int i = 0; i < half; i += W) store(y + i, load(b + i) * load(c[1] + i) + load(a + i) * load(s[1] + i));
        write_floats(row + step, y, half, code);
    }
}

}  // namespace

// `x` [rows, heads, 2 half] with `x_row` bytes from row to row, `cos` and `sin` [rows, 2 half], all of `code`.
KVQ_KERNEL(rope)(uint8_t* x, int64_t x_row, const uint8_t* cos, const uint8_t* sin, int heads, int half, int code,
                 int64_t rows, int threads) {
    int64_t angles = 2 * (int64_t)half * bytes_of(code);
    if (rows * heads * half < WORTH_THREADS) threads = 1;
    run_even(threads, rows, [=](int64_t row) {
        turn(x + row * x_row, cos + row * angles, sin + row * angles, heads, half, code);
    });
    return KVQ_OK;
}
