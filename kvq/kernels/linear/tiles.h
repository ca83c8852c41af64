// A few rows times one or two panels of 16 outputs.
//
// A row's result is the same bit for bit in every tile: its integer sums are exact, and what follows in
// floats is one chain over segments (or over inputs, for FP8) that the other rows have no part in.
#pragma once

#include "inputs.h"

namespace {

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_PANELS = 2;  // 24 of 32 registers are sums
constexpr int FLOAT_ROWS = 12, FLOAT_CHAINS = 12;  // an output has one sum: others fill the time it takes
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 2, TILE_PANELS = 1;  // 8 of 16
constexpr int FLOAT_ROWS = 3, FLOAT_CHAINS = 4;
#else
constexpr int TILE_ROWS = 2, TILE_PANELS = 1;
constexpr int FLOAT_ROWS = 2, FLOAT_CHAINS = 4;
#endif
constexpr int AHEAD = 2048;  // bytes: weights that are read once come from memory

struct Output {
    uint8_t* data;
    int64_t row;  // bytes
    int code;
};

inline void write_panel(const Output& out, int64_t row, int64_t panel, int64_t out_features, const Floats& x) {
    int64_t first = panel * OUTPUTS, n = out_features - first;
    uint8_t* to = out.data + row * out.row + first * (out.code == KVQ_FP32 ? 4 : 2);
    float values[OUTPUTS];
    for (int i = 0; i < PARTS; i++) store(values + i * W, x.part[i]);
    if (n >= OUTPUTS)
        write_floats(to, values, OUTPUTS, out.code);
    else
        write_floats(to, values, (int)n, out.code);
}

template <bool NIBBLES>
inline int64_t panel_bytes(const Cut& cut) {
    return (int64_t)cut.k * OUTPUTS / (NIBBLES ? 2 : 1);
}

#define UNROLL _Pragma("GCC unroll 16")

// One segment's integer sums: eight columns at a time, two registers of codes a panel's part. Few rows
// take two sums each, or every sum would wait for the one before.
template <bool NIBBLES, int R, int P, int PLANES>
struct SegmentSums {
    static constexpr int CHAINS = R * P * PLANES * PARTS >= 8 ? 1 : 2;
    vi sums[CHAINS][P][R][PLANES][PARTS];

    inline __attribute__((always_inline)) void start(const int32_t* starts) {
        UNROLL for (int p = 0; p < P; p++)
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int plane = 0; plane < PLANES; plane++)
                    UNROLL for (int i = 0; i < PARTS; i++) {
                        sums[0][p][r][plane][i] = all_of(starts[r * PLANES + plane]);
                        if (CHAINS == 2) sums[CHAINS - 1][p][r][plane][i] = vi{};
                    }
    }

    // Four columns of all panels.
    inline __attribute__((always_inline)) void add(const Weights w[P][PARTS], const int32_t* words, int chain) {
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int plane = 0; plane < PLANES; plane++)
                UNROLL for (int p = 0; p < P; p++)
                    UNROLL for (int i = 0; i < PARTS; i++) {
                        vi& sum = sums[chain][p][r][plane][i];
                        sum = dot<NIBBLES>(sum, w[p][i], words[r * PLANES + plane]);
                    }
    }

    inline __attribute__((always_inline)) vf value(int p, int r, int i) const {
        vi high = sums[0][p][r][0][i], low = sums[0][p][r][PLANES - 1][i];
        if (CHAINS == 2) high += sums[CHAINS - 1][p][r][0][i], low += sums[CHAINS - 1][p][r][PLANES - 1][i];
        return PLANES == 2 ? multiply_add(floats(low), all(LOW_STEP), floats(high)) : floats(high);
    }
};

template <bool NIBBLES, int R, int P, int PLANES>
void integer_tile(const KvqLinear& l, const Cut& cut, const Tile& tile, int64_t panel, const Output& out,
                  int64_t row) {
    constexpr int STEP = NIBBLES ? 64 : 128;  // bytes of eight columns
    int scale_bytes = OUTPUTS * (l.scale_code == KVQ_FP32 ? 4 : 2);
    Floats totals[P][R] = {};
    const uint8_t* codes = l.codes + panel * panel_bytes<NIBBLES>(cut);
    const int32_t* words = tile.words;
    for (int s = 0; s < cut.segments; s++) {
        SegmentSums<NIBBLES, R, P, PLANES> sums;
        sums.start(tile.starts + (int64_t)s * R * PLANES);
        for (int n = length_of(cut, s) / 8; n > 0; n--, codes += STEP, words += 2 * R * PLANES) {
            Weights even[P][PARTS], odd[P][PARTS];
            UNROLL for (int p = 0; p < P; p++) {
                const uint8_t* from = codes + p * panel_bytes<NIBBLES>(cut);
                UNROLL for (int i = 0; i < PARTS; i++) {
                    reg x = load_codes(from + i * W * 4);
                    even[p][i] = ready<NIBBLES>(NIBBLES ? low_nibbles(x) : x);
                    odd[p][i] = ready<NIBBLES>(NIBBLES ? high_nibbles(x) : load_codes(from + 64 + i * W * 4));
                }
                if (R <= 4) __builtin_prefetch(from + AHEAD);
                if (R <= 4 && !NIBBLES) __builtin_prefetch(from + AHEAD + 64);
            }
            sums.add(even, words, 0);
            sums.add(odd, words + R * PLANES, sums.CHAINS - 1);
        }
        int64_t group = s / cut.per_group, at = (int64_t)s * R;
        UNROLL for (int p = 0; p < P; p++) {
            int64_t own = (panel + p) * l.groups + group;
            Floats scales = load_scales(l.scales + own * scale_bytes, l.scale_code), minus_zeros;
            if (l.zeros) minus_zeros = load_minus_zeros(l.zeros + own * OUTPUTS);
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int i = 0; i < PARTS; i++) {
                    vf x = sums.value(p, r, i);
                    if (l.zeros) x = multiply_add(minus_zeros.part[i], all(tile.sums[at + r]), x);
                    totals[p][r].part[i] =
                        multiply_add(x * tile.steps[at + r], scales.part[i], totals[p][r].part[i]);
                }
        }
    }
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) write_panel(out, row + r, panel + p, l.out_features, totals[p][r]);
}

template <int R, int P>
void float_tile(const KvqLinear& l, const Cut& cut, const Tile& tile, int64_t panel, const Output& out, int64_t row) {
    int64_t bytes = panel_bytes<false>(cut);
    const uint8_t* codes = l.codes + panel * bytes;
    Floats totals[P][R] = {};
    const float* x = tile.values;
    for (int k = 0; k < cut.k; k += 4, codes += 4 * OUTPUTS, x += 4 * R)
        UNROLL for (int p = 0; p < P; p++) {
            Floats w[4];
            decode_fp8(w, codes + p * bytes);
            if (R <= 4) __builtin_prefetch(codes + p * bytes + AHEAD);
            UNROLL for (int j = 0; j < 4; j++)
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int i = 0; i < PARTS; i++)
                        totals[p][r].part[i] = multiply_add(w[j].part[i], all(x[j * R + r]), totals[p][r].part[i]);
        }
    int scale_bytes = OUTPUTS * (l.scale_code == KVQ_FP32 ? 4 : 2);
    for (int p = 0; p < P; p++) {
        Floats scales = load_scales(l.scales + (panel + p) * scale_bytes, l.scale_code);
        for (int r = 0; r < R; r++) {
            for (int i = 0; i < PARTS; i++) totals[p][r].part[i] *= scales.part[i] * FP8_FACTOR;
            write_panel(out, row + r, panel + p, l.out_features, totals[p][r]);
        }
    }
}

}  // namespace
