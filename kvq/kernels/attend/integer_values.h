// Weighted sums of a tile of integer V codes, for a few query rows, read in place.
//
// Two tokens' rows are interleaved, so that one multiply-add includes both. A tile's sums are integers;
// results stay in the order of interleaving (value_index) until the end.
#pragma once

#include "integers.h"

#if defined(KVQ_INTEGER)

namespace {

// One query row's weights for a tile, by group, with V's scales in them.
struct IntegerWeights {
    int32_t* pairs;   // [groups, TILE / 2], 16 bits of each of two tokens; with VNNI, bytes (integer_quads.h)
    float* factors;   // [groups], factors of the pairs
    float* minimums;  // [groups, W] sum of weight times minimum since the split began, lane by lane
};

// Multiples of the golden ratio, modulo 1, minus one half: any few adjacent ones are on both sides of 0.
// D94: a factor per tile, row and group, dithered
struct Dither {
    float at[TILE];

    constexpr Dither() : at() {
        for (int i = 0; i < TILE; i++) {
            double x = i * 0.61803398874989485;
            at[i] = (float)(0.999 * (x - (int)x - 0.5));
        }
    }
};
constexpr Dither DITHER;

// Scales are at least 2^-24: a weight below this is negligible compared with the largest one, 1. Its inverse
// would be infinite.
constexpr float NEGLIGIBLE = 1e-30f;

// Weights [TILE] of some rows as integers of 15 bits. A row that sees no key has factors of 0.
//
// Before rounding, a weight is shifted by up to half a step, by an amount that depends on its place in the
// tile: otherwise, many small weights would all become 0 if one weight is large. Rounding errors of weights
// multiply grouped codes, which are 0 or more; the error for the middle code is added with the minimums,
// whose weights are not rounded.
template <bool GROUPED>
inline void integer_weights(const IntegerWeights* out, const float* weights, const float* decays, int rows,
                            const Tile& tile, const Cut& cut) {
    const int end = cut.is_pair ? TILE : (tile.keys + 2 * W - 1) / (2 * W) * (2 * W);
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < cut.groups; g++) {
            const float *x = weights + r * TILE, *scales = tile.scales + g * tile.stride;
            vf most{};
            for (int i = 0; i < end; i += W) most = maximum(most, load(x + i) * load(scales + i));
            out[r].factors[g] = largest(most);
        }
    const reg ones = KVQ_MM(set1_epi16)(1);
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < cut.groups; g++) {
            const float *x = weights + r * TILE, *scales = tile.scales + g * tile.stride;
            const float* minimums = tile.minimums + g * tile.stride;
            float top = out[r].factors[g];
            if (!(top > NEGLIGIBLE)) top = 0;
            float factor = top > 0 ? (MOST - 1) / top : 0.0f;
            out[r].factors[g] = top / (MOST - 1);
            vf minimum{}, wanted{};
            vi given{};
            if (GROUPED) minimum = load(out[r].minimums + g * W) * all(decays[r]);
            for (int i = 0; i < end; i += 2 * W) {
                vf a = load(x + i) * load(scales + i), b = load(x + i + W) * load(scales + i + W);
                reg pairs = rounded_pairs(a * factor + load(DITHER.at + i), b * factor + load(DITHER.at + i + W));
                memcpy(out[r].pairs + (g * TILE + i) / 2, &pairs, sizeof pairs);
                if (!GROUPED) continue;
                wanted += a + b;
                given = multiply_add(given, pairs, ones);
                minimum += load(x + i) * load(minimums + i) + load(x + i + W) * load(minimums + i + W);
            }
            if (!GROUPED) continue;
            vf lost = wanted * factor - floats(given);  // lanes of other tokens, which are all summed at the end
            store(out[r].minimums + g * W, minimum + lost * (cut.middle * out[r].factors[g]));
        }
}

// One number in a register's lower half, one in its upper half.
inline vf halves(float low, float high) {
    return (vf)both_halves((int32_t)bits_of(low), (int32_t)bits_of(high));
}

// The 2 * kinds registers of 16-bit pairs from one chunk of two tokens; PART selects half of
// them (nibbles), or all of them are made at once.
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

// Pairs of tokens to go through, or pairs of pairs.
inline int steps_of(const Tile& tile, const Cut& cut) { return cut.is_pair ? TILE / 4 : (tile.keys + 1) / 2; }

// A chunk of two tokens, or of four.
inline void load_tokens(reg& a, reg& b, const Tile& tile, const Cut& cut, int t, int from, int bytes) {
    const uint8_t* const* rows = tile.rows + 2 * t;
    if (cut.is_pair) {
        a = load_two(rows[0], rows[TILE / 2]);
        b = load_two(rows[1], rows[TILE / 2 + 1]);
    } else {
        a = load_bytes_of(rows[0] + from, bytes);
        b = load_bytes_of(rows[1] + from, bytes);
    }
}

KVQ_PREFETCHES void prefetch_tokens(const Tile& ahead, const Cut& cut, int t, int from) {
    const uint8_t* const* rows = ahead.rows + 2 * t;
    __builtin_prefetch(rows[0] + from);
    __builtin_prefetch(rows[1] + from);
    if (!cut.is_pair) return;
    __builtin_prefetch(rows[TILE / 2] + from);
    __builtin_prefetch(rows[TILE / 2 + 1] + from);
}

// Decode a tile once for many query rows, [TILE / 2, width] pairs.
template <bool NIBBLES>
// D100: variants that gained nothing over narrow codes
inline void stage_values(int32_t* staged, const Tile& tile, const Tile& ahead, const Cut& cut) {
    for (int t = 0; t < steps_of(tile, cut); t++)
        for (int run = 0; run < cut.runs; run++)
            for (int chunk = 0; chunk < cut.chunks; chunk++) {
                reg a, b, x[4];
                int from = run * cut.run_bytes + chunk * BYTES;
                load_tokens(a, b, tile, cut, t, from, bytes_of(cut, chunk));
                prefetch_tokens(ahead, cut, t, from);
                for (int part = 0; part < (NIBBLES ? 2 : 1); part++) {
                    pairs_of<NIBBLES>(x, a, b, part);
                    memcpy(staged, x, sizeof x);
                    staged += 4 * W;
                }
            }
}

// out[r] = out[r] * decay[r] + weights[r] . tile for R rows, without the minimums. TWO: the halves of a
// register have different weights, of other tokens (is_pair) or groups (is_split). STAGED: the
// tile was decoded before.
template <bool NIBBLES, bool TWO, bool STAGED, int R>
inline void integer_values(float* out, int stride, const IntegerWeights* w, const float* decays, const Tile& tile,
                           const Tile& ahead, const int32_t* staged, const Cut& cut) {
    const int steps = steps_of(tile, cut), second = TWO && cut.is_pair ? TILE / 4 : 0;
    for (int run = 0; run < cut.runs; run++)
        for (int chunk = 0; chunk < cut.chunks; chunk++) {
            int from = run * cut.run_bytes + chunk * BYTES, bytes = bytes_of(cut, chunk);
            int low = group_of(cut, run, 0, 0), low2 = group_of(cut, run, 0, TWO && cut.is_split);
            int high = group_of(cut, run, 1, 0), high2 = group_of(cut, run, 1, TWO && cut.is_split);
            for (int part = 0; part < (NIBBLES ? 2 : 1); part++) {
                int at = ((run * cut.chunks + chunk) * 2 + part) * cut.kinds * W;
                vi sums[R][4] = {};
                for (int t = 0; t < steps; t++) {
                    reg x[4];
                    if (STAGED) {
                        const int16_t* p = (const int16_t*)(staged + t * cut.width + at);
#pragma GCC unroll 4
                        for (int i = 0; i < 4; i++) x[i] = load16(p + i * L);
                    } else {
                        reg a, b;
                        load_tokens(a, b, tile, cut, t, from, bytes);
                        if (part == 0) prefetch_tokens(ahead, cut, t, from);
                        pairs_of<NIBBLES>(x, a, b, part);
                    }
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
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    const float* f = w[r].factors;
                    vf factor = TWO ? halves(f[low], f[low2]) : all(f[low]), other = factor;
                    if (NIBBLES) other = TWO ? halves(f[high], f[high2]) : all(f[high]);
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) {  // unrolled, or the sums would stay in memory
                        vi x = TWO && cut.is_pair ? folded(sums[r][i]) : sums[r][i];
                        float* to = out + (int64_t)r * stride + at + i * W;
                        store(to, load(to) * all(decays[r]) + floats(x) * (i >= 2 ? other : factor));
                    }
                }
            }
        }
}

// out += the sums of weights times minimums, [groups, W], of a whole split.
inline void add_minimums(float* out, const IntegerWeights& w, const Cut& cut) {
    float sums[MOST_GROUPS];
    for (int g = 0; g < cut.groups; g++) sums[g] = sum(load(w.minimums + g * W));
    for (int run = 0; run < cut.runs; run++)
        for (int chunk = 0; chunk < cut.chunks; chunk++)
            for (int part = 0; part < 2; part++)
                for (int kind = 0; kind < cut.kinds; kind++, out += W) {
                    int high = kind / 2, other = cut.is_split;
                    store(out, load(out) + halves(sums[group_of(cut, run, high, 0)],
                                                  sums[group_of(cut, run, high, other)]));
                }
}

}  // namespace
#endif
