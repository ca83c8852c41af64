// A few rows times one or two panels of 16 outputs.
//
// A row's result is bit for bit the same in every tile: its integer sums are exact, and its float arithmetic
// is one chain over segments (or over inputs, for FP8), independent of other rows.
#pragma once

#include "around.h"
#include "inputs.h"

namespace {

#if defined(__AVX512F__)
constexpr int CODE_ROWS = 6, CODE_PANELS = 2;  // 24 of 32 registers are sums
constexpr int FP8_ROWS = 12, FP8_CHAINS = 12;  // an output has one sum: others hide its latency
constexpr int FLOAT_ROWS = 12, FLOAT_CHAINS = 24;
constexpr int BLOCK_ROWS = 12, BLOCK_ROWS_IN_FULL = 8;
#elif defined(__AVX2__)
constexpr int CODE_ROWS = 2, CODE_PANELS = 1;  // 8 of 16
constexpr int FP8_ROWS = 3, FP8_CHAINS = 4;
constexpr int FLOAT_ROWS = 6, FLOAT_CHAINS = 6;
constexpr int BLOCK_ROWS = 4, BLOCK_ROWS_IN_FULL = 4;
#else
constexpr int CODE_ROWS = 2, CODE_PANELS = 1;
constexpr int FP8_ROWS = 2, FP8_CHAINS = 4;
constexpr int FLOAT_ROWS = 2, FLOAT_CHAINS = 2;
constexpr int BLOCK_ROWS = 4, BLOCK_ROWS_IN_FULL = 4;
#endif
static_assert(FLOAT_ROWS <= MOST_TILE_ROWS && FP8_ROWS <= MOST_TILE_ROWS, "inputs.h has room for a tile");
constexpr int AHEAD = 4096;  // bytes: weights that are read once come from memory

struct Output {
    uint8_t* data;
    int64_t row;  // bytes
    int code;
    const KvqAround* around;  // or null, if nothing is added
};

inline void write_panel(const Output& out, int64_t row, int64_t panel, int64_t out_features, const Floats& x) {
    int64_t first = panel * OUTPUTS, n = out_features - first;
    uint8_t* to = out.data + row * out.row + first * bytes_of(out.code);
    if (out.code == KVQ_FP32 && n >= OUTPUTS) {
        for (int i = 0; i < PARTS; i++) {
            vf y = out.around ? with_added(*out.around, x.part[i], row, first + i * W) : x.part[i];
            store((float*)to + i * W, y);
        }
        return;
    }
    float values[OUTPUTS];
    for (int i = 0; i < PARTS; i++) store(values + i * W, x.part[i]);
    if (n > OUTPUTS) n = OUTPUTS;
    write_floats(to, values, (int)n, out.code);
    if (out.around) add_after(*out.around, to, row, first, n, out.code);
}

template <bool NIBBLES>
inline int64_t panel_bytes(const Cut& cut) {
    return (int64_t)cut.k * OUTPUTS / (NIBBLES ? 2 : 1);
}

#define UNROLL _Pragma("GCC unroll 16")

// One segment's integer sums: eight columns at a time, two registers of codes per panel's part. Few rows
// use two sums each, or every sum would wait for the previous one.
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

    // Multiply four columns of all panels.
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

// A tile's share of the next weights, which are prefetched from memory while few rows are multiplied: of two panels,
// some bytes of each for every few columns.
// D115: weights of the next step are not read ahead
struct Ahead {
    const uint8_t* next;  // or null
    int64_t step, panel;  // bytes: at a time, from panel to panel

    inline __attribute__((always_inline)) void ask() {
        if (!next) return;
        for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(next + i), __builtin_prefetch(next + panel + i);
        next += step;
    }
};

// The share of tile `index` of `tiles`, of `bytes` of each panel from `next` on, prefetched in `times` pieces.
// D162: weights come from memory while tiles multiply
inline Ahead share_of(const uint8_t* next, int64_t panel, int64_t bytes, int64_t times, int64_t index, int64_t tiles) {
    int64_t step = (bytes / (times * tiles) + 63) / 64 * 64, begin = index * times * step;
    return {next && begin < bytes ? next + begin : nullptr, step, panel};
}

template <bool NIBBLES, int R, int P, int PLANES>
void integer_tile(const KvqLinear& l, const Cut& cut, const Tile& tile, int64_t panel, const Output& out, int64_t row,
                  Ahead ahead) {
    constexpr int STEP = NIBBLES ? 64 : 128;  // bytes of eight columns
    int scale_bytes = OUTPUTS * bytes_of(l.scale_code);
    Floats totals[P][R] = {};
    const uint8_t* codes = l.codes + panel * panel_bytes<NIBBLES>(cut);
    const int32_t* words = tile.words;
    for (int s = 0; s < cut.segments; s++) {
        SegmentSums<NIBBLES, R, P, PLANES> sums;
        sums.start(tile.starts + (int64_t)s * R * PLANES);
        for (int n = length_of(cut, s) / 8; n > 0; n--, codes += STEP, words += 2 * R * PLANES) {
            if (R > 3) ahead.ask();  // with few rows, the test alone costs one row 8%, and most are one tile
            Weights even[P][PARTS], odd[P][PARTS];
            UNROLL for (int p = 0; p < P; p++) {
                const uint8_t* from = codes + p * panel_bytes<NIBBLES>(cut);
                UNROLL for (int i = 0; i < PARTS; i++) {
                    Codes x = load_as<Codes>(from + i * W * 4);
                    even[p][i] = ready<NIBBLES>(NIBBLES ? x & 15 : x);
                    odd[p][i] = ready<NIBBLES>(NIBBLES ? x >> 4 : load_as<Codes>(from + 64 + i * W * 4));
                }
                __builtin_prefetch(from + AHEAD);
                if (!NIBBLES) __builtin_prefetch(from + AHEAD + 64);
            }
            sums.add(even, words, 0);
            sums.add(odd, words + R * PLANES, sums.CHAINS - 1);
        }
        int64_t group = s / cut.per_group, at = (int64_t)s * R;
        UNROLL for (int p = 0; p < P; p++) {
            int64_t own = (panel + p) * l.groups + group;
            Floats scales = load_floats(l.scales + own * scale_bytes, l.scale_code), minus_zeros;
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

// Columns that are multiplied at a time; their weights stay in the second-level cache meanwhile.
struct Block {
    int begin, end;
    float* kept;  // [panels, rows, 16] of a tile: sums up to `begin`, or up to `end`
    int64_t next;  // bytes from a tile's inputs to those of the next tile
    Ahead ahead;
};

// One sum per output, over the columns in their order, for any block.
template <int CODE, int R, int P>
// D161: prefetch the next tile's inputs
void float_tile(const KvqLinear& l, const Cut& cut, const Tile& tile, int64_t panel, const Output& out, int64_t row,
                const Block& block) {
    constexpr int STEP = columns_of(CODE), BYTES = OUTPUTS * bytes_of(CODE);
    int64_t bytes = (int64_t)cut.k * BYTES;
    const uint8_t* codes = l.codes + panel * bytes + (int64_t)block.begin * BYTES;
    const float* x = tile.values + (int64_t)block.begin * R;
    Ahead ahead = block.ahead;
    Floats totals[P][R];
    UNROLL for (int p = 0; p < P; p++)
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int i = 0; i < PARTS; i++)
                totals[p][r].part[i] = block.begin ? load(block.kept + ((p * R + r) * PARTS + i) * W) : vf{};
    for (int k = block.begin; k < block.end; k += 4) {
        ahead.ask();
        if (R == FLOAT_ROWS)  // with few rows, inputs stay in the cache
            for (int i = 0; i < 4 * R; i += 16) __builtin_prefetch((const uint8_t*)(x + i) + block.next, 0, 2);
        UNROLL for (int part = 0; part < 4; part += STEP, codes += STEP * BYTES, x += STEP * R) {
            Floats w[P][STEP];
            UNROLL for (int p = 0; p < P; p++) {
                decode_columns<CODE>(w[p], codes + p * bytes);
                if ((CODE != KVQ_FP8 || R <= 4) && part * BYTES % 64 == 0) __builtin_prefetch(codes + p * bytes + AHEAD);
            }
            UNROLL for (int j = 0; j < STEP; j++)
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int p = 0; p < P; p++)
                        UNROLL for (int i = 0; i < PARTS; i++)
                            totals[p][r].part[i] =
                                multiply_add(w[p][j].part[i], all(x[j * R + r]), totals[p][r].part[i]);
        }
    }
    if (block.end < cut.k) {
        UNROLL for (int p = 0; p < P; p++)
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int i = 0; i < PARTS; i++)
                    store(block.kept + ((p * R + r) * PARTS + i) * W, totals[p][r].part[i]);
        return;
    }
    for (int p = 0; p < P; p++) {
        Floats scales;
        if (CODE == KVQ_FP8)
            scales = load_floats(l.scales + (panel + p) * OUTPUTS * bytes_of(l.scale_code), l.scale_code);
        for (int r = 0; r < R; r++) {
            if (CODE == KVQ_FP8)
                for (int i = 0; i < PARTS; i++) totals[p][r].part[i] *= scales.part[i] * FP8_FACTOR;
            write_panel(out, row + r, panel + p, l.out_features, totals[p][r]);
        }
    }
}

}  // namespace
