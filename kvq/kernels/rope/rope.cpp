// rope on CPUs: see reference.py. A task is a row of contiguous heads.

#include "../native/rowwise.h"

namespace {

constexpr int MOST_HALF = 512;              // elements of half a head

inline void turn(uint8_t* row, const uint8_t* cos, const uint8_t* sin, int heads, int half, int code) {
    float room[6][MOST_HALF];
    const float *c[2], *s[2];
    int step = half * bytes_of(code);
    for (int i = 0; i < 2; i++) {
        c[i] = floats_at(room[i], cos + i * step, half, code);
        s[i] = floats_at(room[2 + i], sin + i * step, half, code);
    }
    for (int head = 0; head < heads; head++, row += 2 * step) {
        const float *a = floats_at(room[4], row, half, code), *b = floats_at(room[5], row + step, half, code);
        float *first = results_at(room[4], row, half, code), *second = results_at(room[5], row + step, half, code);
        for (int i = 0; i < half; i += W) {
            vf x = load(a + i), y = load(b + i);
            store(first + i, x * load(c[0] + i) - y * load(s[0] + i));
            store(second + i, y * load(c[1] + i) + x * load(s[1] + i));
        }
        settle(row, first, half, code);
        settle(row + step, second, half, code);
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
