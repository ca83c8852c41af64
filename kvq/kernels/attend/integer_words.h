// Scores of a few query rows over a tile of codes of 2 or 4 bits, read in place, whose rows are transposed.
//
// A register contains the same word of W keys. Shifts and masks convert it to pairs of 16-bit numbers, whose products
// with a query's pairs are summed key by key: nothing is summed across lanes. Queries are stored in the resulting order
// of elements. With VNNI, codes are multiplied as bytes, with the high and the low byte of every element of a query.
// The integers, and so the scores, are the same as elsewhere.
#pragma once

#include "integer_keys.h"

#if defined(KVQ_INTEGER)

namespace {

constexpr int MOST_WORDS = MOST_INTEGER_DIM / 8;  // of a row of nibbles
constexpr int WORD_COLUMNS = 2;                   // registers of keys at a time

// 16 bytes of W / 4 rows, four apart.
inline reg load_quarters(const uint8_t* const* rows, int at) {
    __m256i half = _mm256_set_m128i(load_as<__m128i>(rows[4] + at), load_as<__m128i>(rows[0] + at));
#if defined(__AVX512F__)
    reg x = _mm512_castsi256_si512(half);
    x = _mm512_inserti32x4(x, load_as<__m128i>(rows[8] + at), 2);
    x = _mm512_inserti32x4(x, load_as<__m128i>(rows[12] + at), 3);
    return x;
#else
    return half;
#endif
}

// Transpose COUNT times 16 bytes of W rows; word i goes to out[i * WORD_COLUMNS].
template <int COUNT>
inline void turn_some_words(reg* out, const uint8_t* const* rows, int at) {
    reg x[4][COUNT];
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++)
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) x[q][i] = load_quarters(rows + q, at + 16 * i);
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++, out += 4 * WORD_COLUMNS) {
        reg ab = KVQ_MM(unpacklo_epi32)(x[0][i], x[1][i]), cd = KVQ_MM(unpacklo_epi32)(x[2][i], x[3][i]);
        out[0 * WORD_COLUMNS] = KVQ_MM(unpacklo_epi64)(ab, cd);
        out[1 * WORD_COLUMNS] = KVQ_MM(unpackhi_epi64)(ab, cd);
        ab = KVQ_MM(unpackhi_epi32)(x[0][i], x[1][i]), cd = KVQ_MM(unpackhi_epi32)(x[2][i], x[3][i]);
        out[2 * WORD_COLUMNS] = KVQ_MM(unpacklo_epi64)(ab, cd);
        out[3 * WORD_COLUMNS] = KVQ_MM(unpackhi_epi64)(ab, cd);
    }
}

// The same for all of their `bytes` bytes.
inline void turn_words(reg* out, const uint8_t* const* rows, int bytes) {
    constexpr int MOST = W / 4;  // of 16 bytes, which registers have room for
    int from = 0;
    for (; from + 16 * MOST <= bytes; from += 16 * MOST, out += 4 * MOST * WORD_COLUMNS)
        turn_some_words<MOST>(out, rows, from);
    for (; from < bytes; from += 16, out += 4 * WORD_COLUMNS) turn_some_words<1>(out, rows, from);
}

// Adjacent words whose codes of one part of the row belong to one group; a word has the elements
// 4 i to 4 i + 3 of each part, from bit `shift` of its bytes on.
struct WordRun {
    int first, count, shift, group;
};

constexpr int MOST_RUNS = MOST_GROUPS + 8 / 2;  // groups, or parts, that runs can end with

struct WordRuns {
    int count;
    WordRun at[MOST_RUNS];
};

// All of a row, in the order of its elements.
template <int BITS>
inline WordRuns runs_of(const Cut& cut) {
    WordRuns runs;
    runs.count = 0;
    const int dim = 2 * cut.row_bytes, length = dim * BITS / 8, size = dim / cut.groups;
    for (int e = 0, count; e < dim; e += count) {
        int part = e / length, left = size - e % size;
        count = (part + 1) * length - e < left ? (part + 1) * length - e : left;
        runs.at[runs.count++] = {(e - part * length) / 4, count / 4, part * BITS, e / size};
    }
    return runs;
}

template <int BITS>
inline bool takes_words(const KvqRows& rows) {
    return rows.dim * BITS % 128 == 0 && rows.group_size % 4 == 0;
}

#if defined(__AVX512VNNI__)
constexpr int SUMS = 2;  // of a key: of products with high and with low bytes
// sums += the products of a run's words with the elements of R rows from `e` on.
template <int BITS, int R>
inline void multiply_words(vi (*sums)[SUMS][WORD_COLUMNS], const IntegerQuery* q, const reg* words, const WordRun& run,
                           int e, const uint8_t* const* ahead) {
    const reg mask = KVQ_MM(set1_epi8)((1 << BITS) - 1);
    const __m128i shift = _mm_cvtsi32_si128(run.shift);
    for (int left = run.count; left > 0; left--, e += 4, words += WORD_COLUMNS) {
        __builtin_prefetch(ahead[e / 4u % (WORD_COLUMNS * W)] + e / 4u / (WORD_COLUMNS * W) * 64);
        reg codes[WORD_COLUMNS];
#pragma GCC unroll 2
        for (int c = 0; c < WORD_COLUMNS; c++) codes[c] = KVQ_MM(srl_epi32)(words[c], shift) & mask;
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int low = 0; low < 2; low++) {
                reg y = both(((const int32_t*)(q[r].q + e))[low]);
#pragma GCC unroll 2
                for (int c = 0; c < WORD_COLUMNS; c++) {
                    sums[r][low][c] = multiply_bytes(sums[r][low][c], codes[c], y);
                    keep(sums[r][low][c]);
                }
            }
    }
}
inline vi whole(const vi (*sums)[WORD_COLUMNS], int column) { return whole(sums[0][column], sums[1][column], 0); }
// Put the elements of a query into the order of its products: of each word, high bytes, then low ones.
inline void order_words(int16_t* q, int dim) {
    for (int e = 0; e < dim; e += 4) {
        int8_t bytes[8];
        for (int i = 0; i < 4; i++) bytes[i] = (int8_t)((q[e + i] + 128) >> 8), bytes[4 + i] = (int8_t)q[e + i];
        memcpy(q + e, bytes, sizeof bytes);
    }
}
#else
constexpr int SUMS = 1;
template <int BITS, int R>
inline void multiply_words(vi (*sums)[SUMS][WORD_COLUMNS], const IntegerQuery* q, const reg* words, const WordRun& run,
                           int e, const uint8_t* const* ahead) {
    const reg mask = KVQ_MM(set1_epi32)(((1 << BITS) - 1) * 0x10001);
    const __m128i shifts[2] = {_mm_cvtsi32_si128(run.shift), _mm_cvtsi32_si128(run.shift + 8)};
    for (int left = run.count; left > 0; left--, e += 4, words += WORD_COLUMNS) {
        __builtin_prefetch(ahead[e / 4u % (WORD_COLUMNS * W)] + e / 4u / (WORD_COLUMNS * W) * 64);
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            reg pairs[WORD_COLUMNS];
#pragma GCC unroll 2
            for (int c = 0; c < WORD_COLUMNS; c++) pairs[c] = KVQ_MM(srl_epi32)(words[c], shifts[odd]) & mask;
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                reg y = both(((const int32_t*)(q[r].q + e))[odd]);
#pragma GCC unroll 2
                for (int c = 0; c < WORD_COLUMNS; c++) {
                    sums[r][0][c] = multiply_add(sums[r][0][c], pairs[c], y);
                    keep(sums[r][0][c]);
                }
            }
        }
    }
}
inline vi whole(const vi (*sums)[WORD_COLUMNS], int column) { return sums[0][column]; }
// The same: of each word, even bytes, then odd ones.
inline void order_words(int16_t* q, int dim) {
    for (int e = 0; e < dim; e += 4) {
        int16_t second = q[e + 1];
        q[e + 1] = q[e + 2], q[e + 2] = second;
    }
}
#endif

// Scores of R rows over the WORD_COLUMNS * W keys from `key` on, whose words are x.
template <int BITS, int R>
// D99: few rows: words of 4 codes, key by key
inline void word_scores(float* scores, const IntegerQuery* q, const reg* x, const Tile& tile, const WordRuns& runs,
                        int key, const uint8_t* const* ahead) {
    vf scored[R][WORD_COLUMNS] = {};
    for (int i = 0, e = 0; i < runs.count;) {
        int group = runs.at[i].group;
        vi sums[R][SUMS][WORD_COLUMNS] = {};
        for (; i < runs.count && runs.at[i].group == group; e += 4 * runs.at[i++].count)
            multiply_words<BITS, R>(sums, q, x + runs.at[i].first * WORD_COLUMNS, runs.at[i], e, ahead);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int c = 0; c < WORD_COLUMNS; c++)
                add_score(scored[r][c], whole(sums[r], c), tile, group, key + c * W, true, q[r].sums[group]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int c = 0; c < WORD_COLUMNS; c++) store(scores + r * TILE + key + c * W, scored[r][c] * q[r].factor);
}

// Scores [rows, TILE] of at most MOST_FEW query rows over the tile's first `keys` keys, rounded up to whole registers.
template <int BITS>
inline void turned_scores(float* scores, const IntegerQuery* q, int rows, const Tile& tile, const Tile& ahead,
                          const Cut& cut, int keys) {
    typedef void (*Kernel)(float*, const IntegerQuery*, const reg*, const Tile&, const WordRuns&, int,
                           const uint8_t* const*);
    constexpr Kernel KERNELS[] = {word_scores<BITS, 1>, word_scores<BITS, 2>, word_scores<BITS, 3>,
                                  word_scores<BITS, 4>};
    reg words[MOST_WORDS * WORD_COLUMNS];
    const int bytes = cut.row_bytes * BITS / 4;
    const WordRuns runs = runs_of<BITS>(cut);
    for (int key = 0; key < keys; key += WORD_COLUMNS * W) {
        for (int c = 0; c < WORD_COLUMNS; c++) turn_words(words + c, tile.rows + key + c * W, bytes);
        for (int i = cut.row_bytes / 2; i < WORD_COLUMNS * W; i++)  // rows that a product has no step for
            __builtin_prefetch(ahead.rows[key + i]);
        for (int r = 0, some; r < rows; r += some) {
            some = some_of(rows - r, MOST_ROWS);
            KERNELS[some - 1](scores + r * TILE, q + r, words, tile, runs, key, (r ? tile : ahead).rows + key);
        }
    }
}

}  // namespace
#endif
