// Rows of inputs, prepared for a tile of rows: rounded to signed bytes, or as floats for weights in floats or FP8.
//
// If the format does not round inputs, they become 16-bit numbers in two bytes: over at most 128
// columns of one group, with step = largest / 127, x is step * (high + low / 254) to 1 / 64,000 of the largest.
// Two integer products then replace one in floats. If the format rounds inputs to INT8, `high` is the
// code, with the whole row's step, as in linear/reference.py, or with one for each group of columns. The step of rows with a NaN or an infinity is NaN.
#pragma once

#include "lanes.h"
#include "../native/memory.h"

namespace {

constexpr int MOST_TILE_ROWS = 12;
constexpr int PAIR_ROWS = 12, MATRIX_ROWS = 32, BYTE_ROWS = 16;  // of a tile, for products of bf16, of bytes
constexpr int SPLIT_WORDS = 768;  // int32 of all parts of 32 columns of 16 rows: split.h
constexpr float LOW_STEP = 1.0f / 254.0f;
constexpr int PRECISE = 128;    // columns of a segment: 128 * 255 * 127 < 2^24 is exact as a float
constexpr int MOST_SUMMED = 1 << 15;  // 2^15 * 255 * 127 < 2^31: sums of INT8 inputs can't overflow

// Division of the columns into segments: pieces of a group whose products are summed as integers.
struct Cut {
    int k, group, most;  // columns in total, of a group, of a segment
    int per_group, segments;
};

inline Cut cut_of(const KvqLinear& l) {
    Cut c = {l.k, l.k / l.groups, l.inputs == KVQ_INPUTS_FULL ? PRECISE : MOST_SUMMED, 0, 0};
    c.per_group = (c.group + c.most - 1) / c.most;
    c.segments = c.per_group * l.groups;
    return c;
}

inline int begin_of(const Cut& c, int segment) {
    return segment / c.per_group * c.group + segment % c.per_group * c.most;
}

inline int length_of(const Cut& c, int segment) {
    int left = c.group - segment % c.per_group * c.most;
    return left < c.most ? left : c.most;
}

// A few rows of inputs. `planes`: 2 if there are low bytes, too.
struct Tile {
    int rows, given;  // there is room for `rows`
    // D156: integers; inputs keep 16 bits: decode has time
    int32_t* words;   // four columns each, in the layout of Words; for bf16 products see bf16.h and split.h
    int32_t* starts;  // [segments, rows, planes]: minus the codes' offset times the sum of the segment's bytes
    float* sums;      // [segments, rows]: of high + low / 254
    float* steps;     // [segments, rows]
    float* values;    // [k, rows], for floats and FP8, without all of the above
};

inline bool has_float_sums(const KvqLinear& l) { return l.code <= KVQ_FP8; }

// Weights in blocks are multiplied by few numbers of rows.
inline int padded_rows(const KvqLinear& l, int rows) {
    return l.code != KVQ_BLOCKS || rows <= 2 ? rows : rows <= 4 ? 4 : rows <= 8 ? 8 : 12;
}

inline Tile take_tile(const KvqLinear& l, const Cut& cut, int products, int given, Memory& memory) {
    int rows = padded_rows(l, given);
    Tile t = {rows, given, nullptr, nullptr, nullptr, nullptr, nullptr};
    if (products == KVQ_PRODUCTS_SPLIT) {
        t.words = memory.take<int32_t>(((int64_t)cut.k + 31) / 32 * (rows <= MATRIX_ROWS / 2 ? 1 : 2) * SPLIT_WORDS);
        return t;
    }
    if (products == KVQ_PRODUCTS_PAIRS || products == KVQ_PRODUCTS_TILES) {
        t.words = memory.take<int32_t>((int64_t)cut.k / 2 * (products == KVQ_PRODUCTS_TILES ? MATRIX_ROWS : rows));
        return t;
    }
    if (has_float_sums(l)) {
        t.values = memory.take<float>((int64_t)cut.k * rows + W);  // whole registers are written
        return t;
    }
    int planes = l.inputs == KVQ_INPUTS_FULL ? 2 : 1, places = products == KVQ_PRODUCTS_BYTES ? BYTE_ROWS : rows;
    t.words = memory.take<int32_t>((int64_t)cut.k / 4 * places * planes);
    t.starts = memory.take<int32_t>((int64_t)cut.segments * rows * planes);
    t.sums = memory.take<float>((int64_t)cut.segments * rows);
    t.steps = memory.take<float>((int64_t)cut.segments * rows);
    return t;
}

inline float element(const uint8_t* x, int64_t i, int code) {
    if (code == KVQ_FP32) return ((const float*)x)[i];
    uint16_t half = ((const uint16_t*)x)[i];
    return code == KVQ_BF16 ? from_bf16(half) : from_fp16(half);
}

// Return `n` columns from `begin` on in the order of groups, then zeros: in place, or read into `row`.
inline const float* read_columns(float* row, const KvqLinear& l, const uint8_t* x, int code, int begin, int n) {
    int left = (int)l.in_features - begin, given = left < n ? left : n;
    if (!l.order && code == KVQ_FP32 && given == n) return (const float*)x + begin;
    if (!l.order)
        read_floats(row, x + (int64_t)begin * bytes_of(code), given, code);
    else
        for (int i = 0; i < given; i++) row[i] = element(x, l.order[begin + i], code);
    for (int i = given; i < n; i++) row[i] = 0;
    return row;
}

inline vf load_some(const float* p, int n) {  // load the first `n`, then zeros
    vf x = {};
    if (n >= W) return load(p);
    memcpy(&x, p, (size_t)n * 4);
    return x;
}

// Return the largest magnitude above `most`; NaN if a value is infinite or NaN.
inline float step_of(const float* x, int n, float most) {
    vi most_bits = {};
    for (int i = 0; i < n; i += W) {  // as integers: a NaN is larger than all other values, and not lost
        vi bits = (vi)load_some(x + i, n - i) & 0x7fffffff;
        most_bits = bits > most_bits ? bits : most_bits;
    }
    int32_t found = largest(most_bits);
    return found >= 0x7f800000 ? float_of_bits(0x7fc00000) : float_of_bits((uint32_t)found) / most;
}

typedef int8_t vb __attribute__((vector_size(W)));
constexpr float NEAREST = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even, in the low bits

struct Sums {
    int32_t high, low;
};

// Layout of a row's words: [k / 4, rows, planes], or [k / 64, planes, 16 rows, 16] for products of bytes.
struct Words {
    int32_t* first;
    int64_t next, plane, block;  // from a word to the next one of its 16, to the low one, to the next 16
    int32_t* at(uint32_t column) const { return first + column / 64 * block + column % 64 / 4 * next; }
};

inline Words words_of(const Tile& tile, int r, int planes, bool in_bytes) {
    if (in_bytes) return {tile.words + r * 16, 1, BYTE_ROWS * 16, (int64_t)planes * BYTE_ROWS * 16};
    int64_t next = (int64_t)tile.rows * planes;
    return {tile.words + r * planes, next, 1, 16 * next};
}

// Write the bytes of `n` columns from `begin` on.
template <int PLANES>
inline Sums round_columns(const Words& words, int begin, const float* x, int n, float step) {
    vi high_sum = {}, low_sum = {};
    for (int i = 0; i < n; i += W) {
        vf q = load_some(x + i, n - i) / step;
        q = q > 127.0f ? all(127.0f) : q;
        q = q < -127.0f ? all(-127.0f) : q;
        vf shifted = q + NEAREST, rest = (q - (shifted - NEAREST)) * 254.0f + NEAREST;
        vi high = (vi)shifted - 0x4b400000, low = (vi)rest - 0x4b400000;
        high_sum += high, low_sum += low;
        int32_t bytes[PLANES][W / 4];
        vb narrow = __builtin_convertvector(high, vb);
        memcpy(bytes[0], &narrow, W);
        narrow = __builtin_convertvector(low, vb);
        if (PLANES == 2) memcpy(bytes[PLANES - 1], &narrow, W);
        if (words.next == 1 && n - i >= W) {
            for (int p = 0; p < PLANES; p++) memcpy(words.at(begin + i) + p * words.plane, bytes[p], W);
            continue;
        }
#if defined(__AVX512F__)
        if (n - i >= W) {
            typedef int32_t Four __attribute__((vector_size(16)));
            int32_t* to = words.at(begin + i);
            Four h = load_as<Four>(bytes[0]), l = load_as<Four>(bytes[PLANES - 1]);
            if (PLANES == 1) {
                for (int j = 0; j < 4; j++) to[j * words.next] = h[j];
                continue;
            }
            __m128i pairs[2] = {_mm_unpacklo_epi32((__m128i)h, (__m128i)l), _mm_unpackhi_epi32((__m128i)h, (__m128i)l)};
            for (int j = 0; j < 4; j++, to += words.next) memcpy(to, (uint8_t*)pairs + 8 * j, 8);  // low after high
            continue;
        }
#endif
        for (int j = 0; j < W / 4 && i + 4 * j < n; j++)
            for (int p = 0; p < PLANES; p++) words.at(begin + i + 4 * j)[p * words.plane] = bytes[p][j];
    }
    return {sum(high_sum), sum(low_sum)};
}

// `offset`: offset of the codes by which the row is multiplied.
template <int PLANES>
// D167: sums and maxima by registers, no division
inline void round_row(const Tile& tile, int r, const float* row, const Cut& cut, int offset, bool in_bytes, bool by_segment) {
    float whole = by_segment ? 0 : step_of(row, cut.k, 127.0f);
    Words words = words_of(tile, r, PLANES, in_bytes);
    for (int s = 0; s < cut.segments; s++) {
        int begin = begin_of(cut, s), n = length_of(cut, s);
        int64_t at = (int64_t)s * tile.rows + r;
        float step = by_segment ? step_of(row + begin, n, 127.0f) : whole;
        Sums sums = {};
        if (step > 0)
            sums = round_columns<PLANES>(words, begin, row + begin, n, step);
        else
            for (int i = 0; i < n; i += 4)
                for (int p = 0; p < PLANES; p++) words.at(begin + i)[p * words.plane] = 0;
        tile.starts[at * PLANES] = -offset * sums.high;
        if (PLANES == 2) tile.starts[at * PLANES + 1] = -offset * sums.low;
        tile.sums[at] = PLANES == 2 ? sums.low * LOW_STEP + sums.high : (float)sums.high;
        tile.steps[at] = step;
    }
}

// Return the nearest E4M3 value, ties to even.
inline float rounded_fp8(float x) {
    float magnitude = __builtin_fabsf(x);
    if (magnitude > 448.0f) magnitude = 448.0f;
    uint32_t bits = bits_of(magnitude);
    float value = magnitude < 0.015625f ? (magnitude + 16384.0f) - 16384.0f  // steps of 2^-9
                                        : float_of_bits((bits + 0x7ffff + ((bits >> 20) & 1)) & ~0xfffffu);
    return __builtin_copysignf(value, x);
}

inline void round_row_to_fp8(const Tile& tile, int r, const float* row, int k) {
    float* values = tile.values + r;
    float step = step_of(row, k, 448.0f);
    for (int i = 0; i < k; i++)
        values[(int64_t)i * tile.rows] = step == 0 ? row[i] : rounded_fp8(row[i] / step) * step;
}

// Copy rows unchanged, a piece of each at a time: in the tile, the rows of a column are adjacent.
inline void transpose_rows(const Tile& tile, const KvqLinear& l, const uint8_t* x, int64_t x_row, int code) {
    constexpr int PIECE = 64;  // columns
    float room[MOST_TILE_ROWS][PIECE];
    const float* piece[MOST_TILE_ROWS];
    for (int begin = 0; begin < l.k; begin += PIECE) {
        int n = l.k - begin < PIECE ? l.k - begin : PIECE;
        for (int r = 0; r < tile.rows; r++) piece[r] = read_columns(room[r], l, x + r * x_row, code, begin, n);
        float* values = tile.values + (int64_t)begin * tile.rows;
        int i = 0;
#if defined(__AVX512F__)
        for (; i + W <= n; i += W) {  // whole registers: the excess is overwritten by the next
            vf x[W] = {};
            for (int r = 0; r < tile.rows; r++) x[r] = load(piece[r] + i);
            transpose(x);
            for (int j = 0; j < W; j++, values += tile.rows) store(values, x[j]);
        }
#endif
        for (; i < n; i++)
            for (int r = 0; r < tile.rows; r++) *values++ = piece[r][i];
    }
}

}  // namespace
