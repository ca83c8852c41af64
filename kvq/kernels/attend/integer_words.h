// Scores of a few query rows over a tile of codes of 2 or 4 bits, read in place, whose rows are transposed.
//
// A register contains the same word of W keys. Shifts and masks convert it to pairs of 16-bit numbers, whose products
// with a query's pairs are summed key by key: nothing is summed across lanes. Queries are stored in the resulting order
// of elements. The integers, and so the scores, are the same as elsewhere.
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

// Transpose W rows of `bytes` bytes; word i goes to out[i * WORD_COLUMNS].
inline void turn_words(reg* out, const uint8_t* const* rows, int bytes) {
    for (int at = 0; at < bytes; at += 16, out += 4 * WORD_COLUMNS) {
        reg a = load_quarters(rows, at), b = load_quarters(rows + 1, at);
        reg c = load_quarters(rows + 2, at), d = load_quarters(rows + 3, at);
        reg ab = KVQ_MM(unpacklo_epi32)(a, b), cd = KVQ_MM(unpacklo_epi32)(c, d);
        out[0 * WORD_COLUMNS] = KVQ_MM(unpacklo_epi64)(ab, cd);
        out[1 * WORD_COLUMNS] = KVQ_MM(unpackhi_epi64)(ab, cd);
        ab = KVQ_MM(unpackhi_epi32)(a, b), cd = KVQ_MM(unpackhi_epi32)(c, d);
        out[2 * WORD_COLUMNS] = KVQ_MM(unpacklo_epi64)(ab, cd);
        out[3 * WORD_COLUMNS] = KVQ_MM(unpackhi_epi64)(ab, cd);
    }
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
    WordRuns runs = {};
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

// Indices of elements among a query's 16-bit numbers: of each word, even bytes, then odd ones.
inline void find_word_places(int32_t* index, int dim) {
    for (int e = 0; e < dim; e++) index[e] = e / 4 * 4 + e % 2 * 2 + e % 4 / 2;
}

// Scores of R rows over the WORD_COLUMNS * W keys from `key` on, whose words are x.
template <int BITS, int R>
// D99: few rows: words of 4 codes, key by key
inline void word_scores(float* scores, const IntegerQuery* q, const reg* x, const Tile& tile, const WordRuns& runs,
                        int key) {
    const reg mask = KVQ_MM(set1_epi32)(((1 << BITS) - 1) * 0x10001);
    vf scored[R][WORD_COLUMNS] = {};
    for (int i = 0, e = 0; i < runs.count;) {
        int group = runs.at[i].group;
        vi sums[R][WORD_COLUMNS] = {};
        for (; i < runs.count && runs.at[i].group == group; i++) {
            const __m128i shifts[2] = {_mm_cvtsi32_si128(runs.at[i].shift), _mm_cvtsi32_si128(runs.at[i].shift + 8)};
            const reg* words = x + runs.at[i].first * WORD_COLUMNS;
            for (int left = runs.at[i].count; left > 0; left--, e += 4, words += WORD_COLUMNS) {
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
                            sums[r][c] = multiply_add(sums[r][c], pairs[c], y);
                            keep(sums[r][c]);
                        }
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int c = 0; c < WORD_COLUMNS; c++)
                add_score(scored[r][c], sums[r][c], tile, group, key + c * W, true, q[r].sums[group]);
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
    typedef void (*Kernel)(float*, const IntegerQuery*, const reg*, const Tile&, const WordRuns&, int);
    constexpr Kernel KERNELS[] = {word_scores<BITS, 1>, word_scores<BITS, 2>, word_scores<BITS, 3>,
                                  word_scores<BITS, 4>};
    reg words[MOST_WORDS * WORD_COLUMNS];
    const int bytes = cut.row_bytes * BITS / 4;
    const WordRuns runs = runs_of<BITS>(cut);
    for (int key = 0; key < keys; key += WORD_COLUMNS * W) {
        for (int c = 0; c < WORD_COLUMNS; c++) turn_words(words + c, tile.rows + key + c * W, bytes);
        for (int i = key; i < key + WORD_COLUMNS * W; i++)
            for (int at = 0; at < bytes; at += 64) __builtin_prefetch(ahead.rows[i] + at);
        for (int r = 0, some; r < rows; r += some) {
            some = some_of(rows - r, MOST_ROWS);
            KERNELS[some - 1](scores + r * TILE, q + r, words, tile, runs, key);
        }
    }
}

}  // namespace
#endif
