// Scores of a tile into weights, and partial results into one: the running softmax.
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
#pragma once

#include "task.h"

namespace {

inline void start(Partial sum, int rows, int width) {
    for (int r = 0; r < rows; r++) sum.top[r] = minus_infinity(), sum.total[r] = 0;
    memset(sum.out, 0, (size_t)rows * width * 4);
}

// Turn one row's scores [TILE] into weights and let `run` take their sum in. The keys [low, high) are
// visible; the weights of all others become 0.
inline void take_weights(float* scores, int low, int high, float softcap, Partial run, int row, int width) {
    if (low >= high) {
        memset(scores, 0, TILE * 4);
        return;
    }
    if (softcap > 0)
        for (int i = low; i < high; i++) scores[i] = softcap * __builtin_tanhf(scores[i] / softcap);
    for (int i = 0; i < low; i++) scores[i] = minus_infinity();
    for (int i = high; i < TILE; i++) scores[i] = minus_infinity();
    vf most = all(minus_infinity());
    for (int i = 0; i < TILE; i += W) most = maximum(most, load(scores + i));
    float top = largest(most);
    if (top < run.top[row]) top = run.top[row];
    if (top == minus_infinity()) top = 0;  // scores of -inf alone: all weights become 0
    vf total{};
    for (int i = 0; i < TILE; i += W) {
        vf weight = exp_of(load(scores + i) - all(top));
        store(scores + i, weight);
        total += weight;
    }
    if (top != run.top[row]) {
        float decay = __builtin_expf(run.top[row] - top);
        run.total[row] *= decay;
        float* out = run.out + (int64_t)row * width;
        for (int i = 0; i < width; i++) out[i] *= decay;
        run.top[row] = top;
    }
    run.total[row] += sum(total);
}

// sum = sum and part, one row of each.
inline void merge_row(Partial sum, Partial part, int row, int width) {
    if (part.top[row] == minus_infinity()) return;
    float top = sum.top[row] > part.top[row] ? sum.top[row] : part.top[row];
    float old = __builtin_expf(sum.top[row] - top), fresh = __builtin_expf(part.top[row] - top);
    sum.total[row] = sum.total[row] * old + part.total[row] * fresh;
    float *a = sum.out + (int64_t)row * width, *b = part.out + (int64_t)row * width;
    for (int i = 0; i < width; i++) a[i] = a[i] * old + b[i] * fresh;
    sum.top[row] = top;
}

}  // namespace
