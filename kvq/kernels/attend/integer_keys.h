// Scores of a few query rows over a tile of integer codes, read in place.
//
// A key's products are summed lane by lane in a register, W keys' registers are folded into one that
// holds the sum of each key. Integers are exact, so it does not matter in which order that is done.
#pragma once

#include "integers.h"

#if defined(KVQ_INTEGER)

namespace {

// One query row as integers.
struct IntegerQuery {
    const int16_t* q;   // [width]
    const float* sums;  // [groups] of those integers
    float factor;       // what they are to be multiplied by
};

// A query row as integers of 15 bits and sign, laid out as codes are; returns their factor.
inline float integer_query(int16_t* out, float* sums, const float* q, int dim, const Cut& c, const int32_t* index) {
    vf most{};
    int i = 0;
    float top = 0;
    for (; i + W <= dim; i += W) {
        vf x = load(q + i);
        most = maximum(most, maximum(x, -x));
    }
    for (; i < dim; i++) top = q[i] > top ? q[i] : -q[i] > top ? -q[i] : top;
    if (largest(most) > top) top = largest(most);
    float factor = top > 0 ? MOST / top : 0.0f;
    memset(out, 0, (size_t)c.width * 2);
    for (int g = 0; g < c.groups; g++) {
        float total = 0;
        for (int e = g * dim / c.groups; e < (g + 1) * dim / c.groups; e++) {
            float x = __builtin_rintf(q[e] * factor);
            out[index[e]] = (int16_t)x;
            total += x;
        }
        sums[g] = total;
    }
    if (c.is_pair)
        for (int at = 0; at < c.width; at += L) memcpy(out + at + L / 2, out + at, L);
    return top / MOST;
}

// score += one group's share.
inline void add_score(vf& score, vi dots, const Tile& tile, int group, int key, bool has_minimum, float sum) {
    score += floats_of(dots) * load(tile.scales + group * TILE + key);
    if (has_minimum) score += load(tile.minimums + group * TILE + key) * all(sum);
}

// Products of one run of W keys with R rows: low[r][key] and, of nibbles, high[r][key]; of pairs there
// are W / 2 registers of two keys each. WHOLE: high nibbles are added to the low ones' sum.
template <bool NIBBLES, bool WHOLE, bool PAIR, int CHUNKS, int R>
inline void multiply_run(vi (*low)[W], vi (*high)[W], const IntegerQuery* q, int at, const uint8_t* const* rows,
                         const uint8_t* const* ahead, int offset, const Cut& cut) {
    constexpr int KINDS = NIBBLES ? 4 : 2;
    const int chunks = CHUNKS ? CHUNKS : cut.chunks, bytes = cut.run_bytes;
    for (int j = 0; j < W / (PAIR ? 2 : 1); j++) {
        vi a[R] = {}, b[R] = {};
        for (int c = 0; c < chunks; c++) {
            int from = offset + c * BYTES;
            reg x = PAIR ? load_two(rows[2 * j], rows[2 * j + 1]) : load_bytes_of(rows[j] + from, bytes - c * BYTES);
            if (PAIR) {
                __builtin_prefetch(ahead[2 * j]);
                __builtin_prefetch(ahead[2 * j + 1]);
            } else {
                __builtin_prefetch(ahead[j] + from);
            }
            for (int r = 0; r < R; r++) {
                const int16_t* y = q[r].q + at + c * KINDS * L;
                if (NIBBLES) {
                    a[r] = multiply_add(a[r], nibbles<0>(x), load16(y));
                    a[r] = multiply_add(a[r], nibbles<8>(x), load16(y + L));
                    vi& other = WHOLE ? a[r] : b[r];
                    other = multiply_add(other, nibbles<4>(x), load16(y + 2 * L));
                    other = multiply_add(other, nibbles<12>(x), load16(y + 3 * L));
                } else {
                    a[r] = multiply_add(a[r], even_bytes(x), load16(y));
                    a[r] = multiply_add(a[r], odd_bytes(x), load16(y + L));
                }
            }
        }
        for (int r = 0; r < R; r++) {
            low[r][j] = a[r];
            if (NIBBLES && !WHOLE) high[r][j] = b[r];
        }
    }
}

// N registers into one whose lanes are sums of neighbours, in order.
template <int N>
inline vi sums_of_registers(const vi* x) {
    if constexpr (N == 1) {
        return x[0];
    } else {
        return add_neighbours(sums_of_registers<N / 2>(x), sums_of_registers<N / 2>(x + N / 2));
    }
}

// Scores of R query rows over the tile's first `keys` keys, rounded up to whole registers.
template <bool NIBBLES, bool WHOLE, bool PAIR, int CHUNKS, int R>
inline void integer_scores(float* scores, const IntegerQuery* q, const Tile& tile, const Tile& ahead,
                           const Cut& cut, int keys) {
    for (int key = 0; key < keys; key += W) {
        vi low[R][W], high[R][W], dots[R][MOST_GROUPS];
        for (int run = 0; run < cut.runs; run++) {
            multiply_run<NIBBLES, WHOLE, PAIR, CHUNKS, R>(low, high, q, run * cut.chunks * cut.kinds * L,
                                                          tile.rows + key, ahead.rows + key, run * cut.run_bytes,
                                                          cut);
            for (int r = 0; r < R; r++) {
                if (PAIR) {
                    dots[r][0] = sums_of_registers<W / 2>(low[r]);
                    if (NIBBLES && !WHOLE) dots[r][1] = sums_of_registers<W / 2>(high[r]);
                } else if (!cut.is_split) {
                    dots[r][run] = sums_of_registers<W>(low[r]);
                    if (NIBBLES && !WHOLE) dots[r][cut.groups / 2 + run] = sums_of_registers<W>(high[r]);
                } else {  // half a register is a group's: two sums of every key
                    for (int part = 0; part < 2; part++) {
                        vi* x = part ? high[r] : low[r];
                        vi a = sums_of_registers<W / 2>(x), b = sums_of_registers<W / 2>(x + W / 2);
                        int group = part * cut.groups / 2 + 2 * run;
                        dots[r][group] = evens(a, b);
                        dots[r][group + 1] = odds(a, b);
                    }
                }
            }
        }
        for (int r = 0; r < R; r++) {
            vf score{};
            for (int g = 0; g < cut.groups; g++)
                add_score(score, dots[r][g], tile, g, key, NIBBLES, q[r].sums[g]);
            store(scores + r * TILE + key, score * q[r].factor);
        }
    }
}

}  // namespace
#endif
