// Running softmax: turns scores of a tile into weights, and merges partial results.
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
#pragma once

#include "task.h"

namespace {

// State that changes from tile to tile of a split.
struct Running {
    float* decays;  // [rows] factors of all earlier tiles, from this tile's maximum
    float* totals;  // [rows, W] sum of weights, lane by lane
};

inline void start(Partial sum, int rows, int width) {
    for (int r = 0; r < rows; r++) sum.top[r] = minus_infinity(), sum.total[r] = 0;
    memset(sum.out, 0, (size_t)rows * width * 4);
}

// Scores [TILE] that are not in [low, high) become -inf.
inline void mask(float* scores, int low, int high, float softcap) {
    if (low >= high) low = high = TILE;
    if (softcap > 0)
        for (int i = low; i < high; i++) scores[i] = softcap * __builtin_tanhf(scores[i] / softcap);
    for (int i = 0; i < low; i++) scores[i] = minus_infinity();
    for (int i = high; i < TILE; i++) scores[i] = minus_infinity();
}

// Turn masked scores [rows, TILE] into weights relative to the largest score so far. Each step is done
// for all rows before the next, so that latencies of several rows overlap.
inline void take_weights(float* scores, int rows, Partial sum, Running run) {
    for (int r = 0; r < rows; r++) {
        const float* x = scores + r * TILE;
        vf most = load(x);
        for (int i = W; i < TILE; i += W) most = maximum(most, load(x + i));
        run.decays[r] = largest(most);
    }
    for (int r = 0; r < rows; r += W) {  // memory for rows is padded to whole registers
        vf old = load(sum.top + r), top = maximum(old, load(run.decays + r));
        store(sum.top + r, top);
        store(run.decays + r, exp_of(old - (top == all(minus_infinity()) ? vf{} : top)));
    }
    for (int r = 0; r < rows; r++) {
        float* x = scores + r * TILE;
        vf top = all(sum.top[r] == minus_infinity() ? 0.0f : sum.top[r]);  // no key seen: weights of 0
        vf total = load(run.totals + r * W) * all(run.decays[r]);
        for (int i = 0; i < TILE; i += W) {
            vf weight = exp_of(load(x + i) - top);
            store(x + i, weight);
            total += weight;
        }
        store(run.totals + r * W, total);
    }
}

// sum = sum and part, one row of each.
inline void merge_row(Partial sum, Partial part, int row, int width) {
    if (part.total[row] == 0) return;  // NaN continues
    float top = sum.top[row] > part.top[row] ? sum.top[row] : part.top[row];
    float old = __builtin_expf(sum.top[row] - top), fresh = __builtin_expf(part.top[row] - top);
    sum.total[row] = sum.total[row] * old + part.total[row] * fresh;
    float *a = sum.out + (int64_t)row * width, *b = part.out + (int64_t)row * width;
    for (int i = 0; i < width; i++) a[i] = a[i] * old + b[i] * fresh;
    sum.top[row] = top;
}

}  // namespace
