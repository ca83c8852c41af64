// Scores of a few query rows over a tile of integer codes, read in place.
//
// A key's products are summed lane by lane in a register, and W keys' registers are folded into one with
// the sum of each key. Integers are exact, so the order of sums does not matter.
#pragma once

#include "integers.h"

#if defined(KVQ_INTEGER)

namespace {

// One query row as integers.
struct IntegerQuery {
    const int16_t* q;   // [width]
    const float* sums;  // [groups] of those integers
    float factor;       // factor of the integers
};

constexpr float SMALLEST = 1e-30f;

// Convert a query row to integers of 15 bits and sign, in the order of codes; return their factor. Zeros pad it to a
// whole register. A row that begins with NaN is all NaN, and so is its factor. `is_twice`: two keys share a register.
inline float integer_query(int16_t* out, float* sums, const float* q, int dim, const Cut& c, const int32_t* index,
                           bool is_twice) {
    memset(out, 0, (size_t)c.width * 2);
    if (q[0] != q[0]) return q[0];
    vf most{};
    for (int i = 0; i < dim; i += W) most = maximum(most, maximum(load(q + i), -load(q + i)));
    float top = largest(most);
    if (top < SMALLEST) top = 0;  // its inverse would be infinite
    float factor = top > 0 ? c.most / top : 0.0f;
    int32_t x[MOST_INTEGER_DIM];
    for (int i = 0; i < dim; i += W) {
        vi y = __builtin_convertvector(rounded(load(q + i) * factor), vi);
        memcpy(x + i, &y, sizeof y);
    }
    for (int g = 0; g < c.groups; g++) {
        int32_t total = 0;
        for (int e = g * dim / c.groups; e < (g + 1) * dim / c.groups; e++) total += x[e];
        sums[g] = (float)total;
    }
    for (int e = 0; e < dim; e++) out[index[e]] = (int16_t)x[e];
    if (is_twice)
        for (int at = 0; at < c.width; at += L) memcpy(out + at + L / 2, out + at, L);
    return top / c.most;
}

// score += one group's share.
inline void add_score(vf& score, vi dots, const Tile& tile, int group, int key, bool has_minimum, float sum) {
    score += floats(dots) * load(tile.scales + group * tile.stride + key);
    if (has_minimum) score += load(tile.minimums + group * tile.stride + key) * all(sum);
}

constexpr int MOST_ROWS = 4;  // query rows whose sums a kernel keeps in registers

// Rows of the next kernel call, as even as possible: 7 are 4 and 3.
inline int some_of(int rows, int most) { return rows <= most ? rows : rows < 2 * most ? (rows + 1) / 2 : most; }

constexpr int MOST_FEW = 8;   // query rows at a time
constexpr int PIECE = 4;      // registers of 16-bit numbers per key at a time
constexpr int QUADS = W / 4;  // of W keys

// Quarter sums of W keys' products with some rows, one register for every four keys.
struct Quads {
    vi low[MOST_FEW][QUADS], high[MOST_FEW][QUADS];
};

// Products of one piece of W keys with all rows. Four keys (with pairs, four times two) stay in registers
// for all rows. WHOLE: high nibbles are added to the low ones' sum; MORE: so is the previous piece.
template <bool NIBBLES, bool WHOLE, bool PAIR, int CHUNKS, bool MORE>
inline void multiply_piece(Quads& quads, const IntegerQuery* q, int rows, int at, const uint8_t* const* keys,
                           const uint8_t* const* ahead, int from, int bytes) {
    constexpr int KINDS = NIBBLES ? 4 : 2, N = KINDS * CHUNKS;
    for (int quad = 0; quad < (PAIR ? QUADS / 2 : QUADS); quad++) {
        reg x[4][N];
        for (int j = 0; j < 4; j++)
            for (int c = 0; c < CHUNKS; c++) {
                reg y;
                if (PAIR) {
                    int key = 8 * quad + j;
                    y = load_two(keys[key], keys[key + 4]);
                    __builtin_prefetch(ahead[key]);
                    __builtin_prefetch(ahead[key + 4]);
                } else {
                    int key = 4 * quad + j;
                    y = load_bytes_of(keys[key] + from + c * BYTES, bytes - c * BYTES);
                    __builtin_prefetch(ahead[key] + from + c * BYTES);
                }
                reg* to = x[j] + c * KINDS;
                if (NIBBLES)
                    to[0] = nibbles<0>(y), to[1] = nibbles<8>(y), to[2] = nibbles<4>(y), to[3] = nibbles<12>(y);
                else
                    to[0] = even_bytes(y), to[1] = odd_bytes(y);
            }
        for (int r = 0; r < rows; r++) {
            const int16_t* y = q[r].q + at;
            vi a[4] = {}, b[4] = {};
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) {
                reg z = load16(y + i * L);
                vi* sums = NIBBLES && !WHOLE && i % 4 >= 2 ? b : a;
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) sums[j] = multiply_add(sums[j], x[j][i], z);
            }
            vi sum = quarter_sums(a[0], a[1], a[2], a[3]);
            quads.low[r][quad] = MORE ? quads.low[r][quad] + sum : sum;
            if (NIBBLES && !WHOLE) {
                sum = quarter_sums(b[0], b[1], b[2], b[3]);
                quads.high[r][quad] = MORE ? quads.high[r][quad] + sum : sum;
            }
        }
    }
}

// One run of W keys.
template <bool NIBBLES, bool WHOLE, bool PAIR>
inline void multiply_run(Quads& quads, const IntegerQuery* q, int rows, int at, const uint8_t* const* keys,
                         const uint8_t* const* ahead, int from, const Cut& cut, bool more) {
    constexpr int KINDS = NIBBLES ? 4 : 2, MOST = PIECE / KINDS;
    for (int c = 0; c < cut.chunks; c += MOST) {
        int left = cut.run_bytes - c * BYTES, to = at + c * KINDS * L, on = from + c * BYTES;
        bool full = MOST > 1 && c + MOST <= cut.chunks;
        if (more || c)
            full ? multiply_piece<NIBBLES, WHOLE, PAIR, MOST, true>(quads, q, rows, to, keys, ahead, on, left)
                 : multiply_piece<NIBBLES, WHOLE, PAIR, 1, true>(quads, q, rows, to, keys, ahead, on, left);
        else
            full ? multiply_piece<NIBBLES, WHOLE, PAIR, MOST, false>(quads, q, rows, to, keys, ahead, on, left)
                 : multiply_piece<NIBBLES, WHOLE, PAIR, 1, false>(quads, q, rows, to, keys, ahead, on, left);
    }
}

// Return the sums of W keys whose groups have half a register each: of the first (0) or second (1) group.
inline vi keys_of_half(const vi* quads, int half) {
    vi a = sums_of_quarters<QUADS / 2>(quads), b = sums_of_quarters<QUADS / 2>(quads + QUADS / 2);
    return half ? odd_quarters(a, b) : even_quarters(a, b);
}

// Scores [rows, TILE] of at most MOST_FEW query rows over the tile's first `keys` keys, rounded up to
// whole registers.
template <bool NIBBLES, bool WHOLE, bool PAIR>
inline void integer_scores(float* scores, const IntegerQuery* q, int rows, const Tile& tile, const Tile& ahead,
                           const Cut& cut, int keys) {
    Quads quads;
    vi dots[MOST_FEW][MOST_GROUPS];
    for (int key = 0; key < keys; key += W) {
        for (int run = 0; run < cut.runs; run++) {
            multiply_run<NIBBLES, WHOLE, PAIR>(quads, q, rows, run * cut.chunks * cut.kinds * L, tile.rows + key,
                                               ahead.rows + key, run * cut.run_bytes, cut, WHOLE && run);
            for (int r = 0; r < rows; r++)
                for (int part = 0; part < (NIBBLES && !WHOLE ? 2 : 1); part++) {
                    const vi* x = part ? quads.high[r] : quads.low[r];
                    int group = group_of(cut, run, part, 0);
                    if (!PAIR && cut.is_split) {
                        dots[r][group] = keys_of_half(x, 0);
                        dots[r][group + 1] = keys_of_half(x, 1);
                    } else {
                        dots[r][group] = sums_of_quarters<PAIR ? QUADS / 2 : QUADS>(x);
                    }
                }
        }
        for (int r = 0; r < rows; r++) {
            vf score{};
            for (int g = 0; g < cut.groups; g++)
                add_score(score, dots[r][g], tile, g, key, cut.is_grouped, q[r].sums[g]);
            store(scores + r * TILE + key, score * q[r].factor);
        }
    }
}

}  // namespace
#endif
