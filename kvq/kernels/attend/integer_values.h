// Weighted sums of a tile of integer V codes, for a few query rows, read in place.
//
// Two tokens' rows are interleaved, so that one multiply-add takes both in. A tile's sums are integers;
// what comes out lies in the order that interleaving leaves (value_index) until the very end.
#pragma once

#include "integers.h"

#if defined(KVQ_INTEGER)

namespace {

// One query row's weights for a tile, by group, with V's scales in them.
struct IntegerWeights {
    int32_t* pairs;   // [groups, TILE / 2], 16 bits of each of two tokens
    float* factors;   // [groups], what they are to be multiplied by
    float* minimums;  // [groups], sum of weight times minimum
};

// Weights [TILE] as integers of 15 bits. A row that sees nothing has factors of 0.
inline void integer_weights(const IntegerWeights& out, const float* weights, const Tile& tile, const Cut& cut) {
    for (int g = 0; g < cut.groups; g++) {
        const float* scales = tile.scales + g * TILE;
        vf scaled[TILE / W], most{}, minimum{};
        for (int i = 0; i < TILE / W; i++) {
            scaled[i] = load(weights + i * W) * load(scales + i * W);
            most = maximum(most, scaled[i]);
            if (cut.is_nibbles) minimum += load(weights + i * W) * load(tile.minimums + g * TILE + i * W);
        }
        float top = largest(most), factor = top > 0 ? MOST / top : 0.0f;
        for (int i = 0; i < TILE / W; i += 2)
            store_pairs(out.pairs + g * TILE / 2 + i * W / 2, scaled[i] * factor, scaled[i + 1] * factor);
        out.factors[g] = top / MOST;
        out.minimums[g] = cut.is_nibbles ? sum(minimum) : 0.0f;
    }
}

inline vf halves(float low, float high) {
    vf x;
    for (int i = 0; i < W; i++) x[i] = i < W / 2 ? low : high;
    return x;
}

// out += sums of one register, with factor and minimum of its group (or of both halves' groups).
inline void add_sums(float* out, vi sums, const IntegerWeights& w, int group, int other, bool has_minimum) {
    vf factor = group == other ? all(w.factors[group]) : halves(w.factors[group], w.factors[other]);
    vf x = load(out) + floats_of(sums) * factor;
    if (has_minimum)
        x += group == other ? all(w.minimums[group]) : halves(w.minimums[group], w.minimums[other]);
    store(out, x);
}

// The registers of 16-bit pairs that one chunk of two tokens becomes, of which there are
// 2 * kinds; PART picks half of them (nibbles) or all of them are made at once.
template <bool NIBBLES>
inline void pairs_of(reg* out, reg a, reg b, int part) {
    if (NIBBLES) {
        reg x = part ? pairs_high(a, b) : pairs_low(a, b);
        out[0] = nibbles<0>(x), out[1] = nibbles<8>(x), out[2] = nibbles<4>(x), out[3] = nibbles<12>(x);
    } else {
        reg x = pairs_low(a, b), y = pairs_high(a, b);
        out[0] = even_bytes(x), out[1] = odd_bytes(x), out[2] = even_bytes(y), out[3] = odd_bytes(y);
    }
}

// out[r] += weights[r] . tile for R rows. TWO: the halves of a register take different weights, those of
// other tokens (is_pair) or groups (is_split).
template <bool NIBBLES, bool TWO, int R>
inline void integer_values(float* out, int stride, const IntegerWeights* w, const Tile& tile, const Tile& ahead,
                           const Cut& cut) {
    const bool is_pair = TWO && cut.is_pair;
    const int steps = is_pair ? TILE / 4 : TILE / 2, second = is_pair ? TILE / 4 : 0;
    for (int run = 0; run < cut.runs; run++)
        for (int chunk = 0; chunk < cut.chunks; chunk++) {
            int from = run * cut.run_bytes + chunk * BYTES, bytes = bytes_of(cut, chunk);
            int low = group_of(cut, run, 0, 0), low2 = group_of(cut, run, 0, TWO && cut.is_split);
            int high = group_of(cut, run, 1, 0), high2 = group_of(cut, run, 1, TWO && cut.is_split);
            for (int part = 0; part < (NIBBLES ? 2 : 1); part++) {
                vi sums[R][4] = {};
                for (int t = 0; t < steps; t++) {
                    reg a, b, x[4];
                    if (is_pair) {
                        a = load_two(tile.rows[2 * t], tile.rows[2 * t + TILE / 2]);
                        b = load_two(tile.rows[2 * t + 1], tile.rows[2 * t + 1 + TILE / 2]);
                    } else {
                        a = load_bytes_of(tile.rows[2 * t] + from, bytes);
                        b = load_bytes_of(tile.rows[2 * t + 1] + from, bytes);
                    }
                    if (part == 0) {
                        __builtin_prefetch(ahead.rows[2 * t] + from);
                        __builtin_prefetch(ahead.rows[2 * t + 1] + from);
                        if (is_pair) {
                            __builtin_prefetch(ahead.rows[2 * t + TILE / 2] + from);
                            __builtin_prefetch(ahead.rows[2 * t + 1 + TILE / 2] + from);
                        }
                    }
                    pairs_of<NIBBLES>(x, a, b, part);
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) {
                        const int32_t* p = w[r].pairs + t;
                        reg y, z;
                        if (TWO) {
                            y = both_halves(p[low * TILE / 2], p[low2 * TILE / 2 + second]);
                            z = NIBBLES ? both_halves(p[high * TILE / 2], p[high2 * TILE / 2 + second]) : y;
                        } else {
                            y = both(p[low * TILE / 2]);
                            z = NIBBLES ? both(p[high * TILE / 2]) : y;
                        }
                        sums[r][0] = multiply_add(sums[r][0], y, x[0]);
                        sums[r][1] = multiply_add(sums[r][1], y, x[1]);
                        sums[r][2] = multiply_add(sums[r][2], z, x[2]);
                        sums[r][3] = multiply_add(sums[r][3], z, x[3]);
                    }
                }
                int at = ((run * cut.chunks + chunk) * 2 + part) * cut.kinds * W;
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) {  // unrolled, or the sums would lie in memory all along
                        vi x = is_pair ? folded(sums[r][i]) : sums[r][i];
                        bool is_high = NIBBLES && i >= 2;
                        add_sums(out + (int64_t)r * stride + at + i * W, x, w[r], is_high ? high : low,
                                 is_high ? high2 : low2, NIBBLES);
                    }
            }
        }
}

}  // namespace
#endif
