// Products of fp32 rows with weights in floats by tiles of bf16 (native/amx.h), as exact as fp32's own.
//
// An fp32 number is the sum of three bf16 numbers: its upper bits, the upper bits of what these leave, and the rest.
// Of the nine products of two numbers' parts, the six largest are summed in fp32; the omitted ones are together less
// than 2^-23 of the product. (Henry, Tang, Heinecke: Leveraging the bfloat16 artificial intelligence datatype for
// higher-precision computations, ARITH 2019.) Weights in fp16 have two parts, in bf16 one: products with a part
// that is zero change no bit, so a weight's sums are the same in each dtype that holds it.
//
// Every row uses the same products in the same order, for few rows or many. A row with an infinity or a NaN yields NaN.
// Tiles flush denormal numbers: parts and products below 2^-126 are zero, so inputs, weights and their products should
// be above about 1e-31 in magnitude to keep all digits.
#pragma once

#include "bf16.h"

namespace {

constexpr int SPLIT_BLOCK = 768;     // columns whose parts are made at a time, for many rows

}  // namespace

#if defined(KVQ_TILES)

namespace {

constexpr int PART_BYTES = TILE_SIZE * 2;
constexpr int SPLIT_PARTS = 3;                    // of inputs
constexpr int SPLIT_BYTES = SPLIT_PARTS * PART_BYTES;  // of 32 columns of 16 rows
static_assert(SPLIT_BYTES == SPLIT_WORDS * 4, "inputs.h has room for them");
constexpr int SPLIT_PANELS = 4;                   // multiplied with up to 16 rows at a time; with more, half as many
constexpr int SPLIT_AHEAD = 1024;                 // bytes

constexpr int parts_of(int code) { return code == KVQ_FP32 ? 3 : code == KVQ_FP16 ? 2 : 1; }

inline int split_columns(const Cut& cut) { return (cut.k + TILE_PAIRS - 1) / TILE_PAIRS * TILE_PAIRS; }

// Floats of the parts of a block of two panels.
inline int64_t split_size(const Cut& cut) {
    int64_t blocks = (split_columns(cut) < SPLIT_BLOCK ? split_columns(cut) : SPLIT_BLOCK) / TILE_PAIRS;
    return 2 * blocks * SPLIT_BYTES / (int64_t)sizeof(float);
}

inline int split_halves(int rows) { return rows <= TILE_ROWS ? 1 : 2; }  // of a tile of inputs

// Split a number into the upper half of its bits, which is a bf16 number, and the exact remainder.
inline reg upper(vf x) { return _mm512_and_si512((reg)x, _mm512_set1_epi32((int)0xffff0000)); }
inline vf rest(vf x) { return x - (vf)upper(x); }

// Rows of inputs: [columns / 32][halves][parts][16 rows][32 columns].
inline void split_rows(const Tile& tile, const KvqLinear& l, const Cut& cut, const uint8_t* x, int64_t x_row, int code) {
    alignas(64) static const uint16_t odd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const reg uppers = _mm512_load_si512(odd);
    int halves = split_halves(tile.rows), columns = split_columns(cut);
    for (int r = 0; r < halves * TILE_ROWS; r++, x += x_row) {
        uint8_t* to = (uint8_t*)tile.words + r / TILE_ROWS * SPLIT_BYTES + r % TILE_ROWS * 64;
        for (int at = 0; at < columns; at += TILE_PAIRS, to += halves * SPLIT_BYTES) {
            vf a = {}, b = {};
            if (r < tile.rows) {
                float room[TILE_PAIRS];
                const float* some = read_columns(room, l, x, code, at, TILE_PAIRS);
                a = load(some), b = load(some + W);
            }
            for (int part = 0; part < SPLIT_PARTS; part++, a = rest(a), b = rest(b))
                _mm512_storeu_si512(to + part * PART_BYTES, _mm512_permutex2var_epi16((reg)a, uppers, (reg)b));
        }
    }
}

// Up to 32 columns of a panel, an even number, as tiles, one per part. Prefetch FURTHER bytes ahead.
template <int CODE, int FURTHER>
inline __attribute__((always_inline)) void split_pairs(uint8_t* to, const uint8_t* codes, int columns) {
    constexpr int BYTES = OUTPUTS * bytes_of(CODE);
    _Pragma("GCC unroll 4") for (int i = 0; i < TILE_ROWS; i++, codes += 2 * BYTES, to += 64) {
        vf a = {}, b = {};
        if (2 * i < columns) a = load_floats(codes, CODE).part[0], b = load_floats(codes + BYTES, CODE).part[0];
        if (FURTHER) __builtin_prefetch(codes + FURTHER);
        if (FURTHER && BYTES == 64) __builtin_prefetch(codes + FURTHER + BYTES);
        UNROLL for (int part = 0; part < parts_of(CODE); part++, a = rest(a), b = rest(b))
            _mm512_store_si512(to + part * PART_BYTES,
                               _mm512_mask_mov_epi16(_mm512_srli_epi32((reg)a, 16), 0xaaaaaaaa, (reg)b));
    }
}

// Tile SUM of 16 outputs plus the products of rows' parts at `x` with weights' parts at `w`; uses tiles 4 to 7.
// D164: fp32 as three bf16 parts, six of nine products
#define KVQ_SPLIT_ADD(SUM, PARTS, x, w)                                \
    do {                                                              \
        KVQ_TILE_LOAD(4, x, 64);                                      \
        KVQ_TILE_LOAD(5, w, 64);                                      \
        KVQ_TILE_ADD(SUM, 4, 5);                                      \
        if constexpr (PARTS > 1) {                                    \
            KVQ_TILE_LOAD(6, (w) + PART_BYTES, 64);                   \
            KVQ_TILE_ADD(SUM, 4, 6);                                  \
        }                                                             \
        if constexpr (PARTS > 2) {                                    \
            KVQ_TILE_LOAD(7, (w) + 2 * PART_BYTES, 64);               \
            KVQ_TILE_ADD(SUM, 4, 7);                                  \
        }                                                             \
        KVQ_TILE_LOAD(4, (x) + PART_BYTES, 64);                       \
        if constexpr (PARTS > 1) KVQ_TILE_ADD(SUM, 4, 6);             \
        KVQ_TILE_ADD(SUM, 4, 5);                                      \
        KVQ_TILE_LOAD(4, (x) + 2 * PART_BYTES, 64);                   \
        KVQ_TILE_ADD(SUM, 4, 5);                                      \
    } while (0)

// Tiles 0 to 3 plus 32 columns of 32 rows, or tiles 0 and 1 plus those of 16: parts of inputs at `x` times those of two
// panels at `a` and `b`.
#define KVQ_SPLIT_ROWS(part)                       \
    KVQ_TILE_LOAD(4, x + (part) * PART_BYTES, 64); \
    if constexpr (HALVES > 1) KVQ_TILE_LOAD(5, x + SPLIT_BYTES + (part) * PART_BYTES, 64)
#define KVQ_SPLIT_WEIGHTS(part)                    \
    KVQ_TILE_LOAD(6, a + (part) * PART_BYTES, 64); \
    KVQ_TILE_LOAD(7, b + (part) * PART_BYTES, 64)
#define KVQ_SPLIT_PRODUCTS                            \
    do {                                              \
        KVQ_TILE_ADD(0, 4, 6);                        \
        KVQ_TILE_ADD(1, 4, 7);                        \
        if constexpr (HALVES > 1) {                   \
            KVQ_TILE_ADD(2, 5, 6);                    \
            KVQ_TILE_ADD(3, 5, 7);                    \
        }                                             \
    } while (0)
template <int PARTS, int HALVES>
inline __attribute__((always_inline)) void add_pair(const uint8_t* x, const uint8_t* a, const uint8_t* b) {
    KVQ_SPLIT_ROWS(0);
    KVQ_SPLIT_WEIGHTS(0);
    KVQ_SPLIT_PRODUCTS;
    if constexpr (PARTS > 1) {
        KVQ_SPLIT_WEIGHTS(1);
        KVQ_SPLIT_PRODUCTS;
    }
    if constexpr (PARTS > 2) {
        KVQ_SPLIT_WEIGHTS(2);
        KVQ_SPLIT_PRODUCTS;
    }
    KVQ_SPLIT_ROWS(1);
    if constexpr (PARTS > 1) {
        KVQ_SPLIT_WEIGHTS(1);
        KVQ_SPLIT_PRODUCTS;
        KVQ_SPLIT_WEIGHTS(0);
    }
    KVQ_SPLIT_PRODUCTS;
    KVQ_SPLIT_ROWS(2);
    KVQ_SPLIT_PRODUCTS;
}

// One tile of rows times panels [panel, last), four at a time, or two for more than 16 rows. Parts are made meanwhile:
// those of the next columns, or of the next panels' first columns, before they are read.
template <int CODE, int HALVES>
void split_once(const KvqLinear& l, const Cut& cut, const Tile& tile, int64_t panel, int64_t last, const Output& out) {
    constexpr int BYTES = OUTPUTS * bytes_of(CODE), PARTS = parts_of(CODE), PANELS = SPLIT_PANELS / HALVES;
    alignas(64) uint8_t made[2][PANELS][PARTS * PART_BYTES];
    alignas(64) float sums[SPLIT_PANELS][TILE_ROWS * OUTPUTS];  // [panels, rows], of 32 rows [halves, panels, rows]
    const uint8_t *from[PANELS], *x = (const uint8_t*)tile.words, *w[PANELS];
    int64_t making = panel;  // and at which column
    int at = 0, half = 0;
    auto begin_panels = [&]() __attribute__((always_inline)) {
        for (int p = 0; p < PANELS; p++)  // missing panels are multiplied like the last one
            from[p] = l.codes + (making + p < last ? making + p : last - 1) * (int64_t)cut.k * BYTES;
    };
    // A panel's 32 columns are read in one run while the next ones are prefetched, for the most memory bandwidth.
    auto make = [&](int p) __attribute__((always_inline)) {
        if (CODE == KVQ_BF16 || p >= PANELS || making >= last) return;
        if (__builtin_expect(cut.k - at < TILE_PAIRS, 0))
            return split_pairs<CODE, 0>(made[half][p], from[p], cut.k - at);
        split_pairs<CODE, SPLIT_AHEAD>(made[half][p], from[p], TILE_PAIRS);
    };
    // Multiply the parts that were made, and make the next ones.
    auto pass_on = [&]() __attribute__((always_inline)) {
        for (int p = 0; p < PANELS; p++) {
            w[p] = CODE == KVQ_BF16 ? from[p] : made[half][p];
            if (CODE == KVQ_BF16) passed(from[p]);
            from[p] += TILE_PAIRS * BYTES;
        }
        half ^= 1, at += TILE_PAIRS;
        if (at >= cut.k) making += PANELS, at = 0, begin_panels();
    };
    begin_panels();
    for (int p = 0; p < PANELS; p++) make(p);
    for (; panel < last; panel += PANELS, x = (const uint8_t*)tile.words) {
        zero_sums();
        for (int k = 0; k < cut.k; k += TILE_PAIRS, x += HALVES * SPLIT_BYTES) {
            pass_on();
            make(0);
            if constexpr (HALVES == 1) {
                KVQ_SPLIT_ADD(0, PARTS, x, w[0]);
                make(1);
                KVQ_SPLIT_ADD(1, PARTS, x, w[1]);
                make(2);
                KVQ_SPLIT_ADD(2, PARTS, x, w[2]);
                make(3);
                KVQ_SPLIT_ADD(3, PARTS, x, w[3]);
            } else {
                add_pair<PARTS, HALVES>(x, w[0], w[1]);
                make(1);
            }
        }
        KVQ_TILE_STORE(0, sums[0], 64);
        KVQ_TILE_STORE(1, sums[1], 64);
        KVQ_TILE_STORE(2, sums[2], 64);
        KVQ_TILE_STORE(3, sums[3], 64);
        int count = last - panel < PANELS ? (int)(last - panel) : PANELS;
        for (int r = 0; r < tile.rows; r++)
            for (int p = 0; p < count; p++) {
                const float* sum = sums[r / TILE_ROWS * PANELS + p] + r % TILE_ROWS * OUTPUTS;
                write_panel(out, r, panel + p, l.out_features, {{load(sum)}});
            }
    }
}

// The parts of a block of two panels, [columns / 32][parts][16][32] each; for bf16, they are the weights themselves.
struct SplitPair {
    const uint8_t* panels[2];
    int count;             // panels that exist
    const uint8_t* next;   // weights of the next two panels' block, which are prefetched; or null
    int64_t next_panel;    // bytes
    int lines;             // of each, for 32 columns of a tile of rows
};

template <int CODE>
SplitPair split_pair(const KvqLinear& l, const Cut& cut, int64_t panel, int64_t last, int begin, int end, int64_t tiles,
                     uint8_t* made) {
    constexpr int BYTES = OUTPUTS * bytes_of(CODE), PARTS = parts_of(CODE);
    SplitPair pair = {{}, last - panel < 2 ? 1 : 2, nullptr, (int64_t)cut.k * BYTES, 0};
    for (int p = 0; p < pair.count; p++) {
        const uint8_t* codes = l.codes + ((panel + p) * cut.k + begin) * (int64_t)BYTES;
        pair.panels[p] = CODE == KVQ_BF16 ? codes : made;
        for (int at = begin; CODE != KVQ_BF16 && at < end; at += TILE_PAIRS, codes += TILE_PAIRS * BYTES)
            split_pairs<CODE, 0>(made, codes, end - at), made += PARTS * PART_BYTES;
    }
    if (pair.count == 1) pair.panels[1] = pair.panels[0];
    if (panel + 4 <= last) {
        pair.next = l.codes + ((panel + 2) * cut.k + begin) * (int64_t)BYTES;
        pair.lines = (int)((TILE_PAIRS * BYTES / 64 + tiles - 1) / tiles);
    }
    return pair;
}

// 16 or 32 rows times two panels; `kept` [panels][32 rows][16].
template <int CODE, int HALVES>
inline void split_many(const KvqLinear& l, const Cut& cut, const Tile& tile, SplitPair& pair, int64_t panel,
                       const Output& out, int64_t row, const Block& block) {
    constexpr int PARTS = parts_of(CODE);
    constexpr int64_t KEPT = MATRIX_ROWS * OUTPUTS, HALF = TILE_ROWS * OUTPUTS;
    const uint8_t *a = pair.panels[0], *b = pair.panels[1];
    const uint8_t* x = (const uint8_t*)tile.words + (int64_t)block.begin / TILE_PAIRS * HALVES * SPLIT_BYTES;
    float *first = block.kept, *second = first + (pair.count - 1) * KEPT;
    if (block.begin) {
        KVQ_TILE_LOAD(0, first, 64);
        KVQ_TILE_LOAD(1, second, 64);
        KVQ_TILE_LOAD(2, first + HALF, 64);
        KVQ_TILE_LOAD(3, second + HALF, 64);
    } else {
        zero_sums();
    }
    for (int at = block.begin; at < block.end; at += TILE_PAIRS) {
        for (int i = 0; i < pair.lines; i++, pair.next += 64) {
            __builtin_prefetch(pair.next, 0, 2);
            __builtin_prefetch(pair.next + pair.next_panel, 0, 2);
        }
        add_pair<PARTS, HALVES>(x, a, b);
        a += PARTS * PART_BYTES, b += PARTS * PART_BYTES, x += HALVES * SPLIT_BYTES;
    }
    KVQ_TILE_STORE(0, first, 64);
    KVQ_TILE_STORE(1, second, 64);
    KVQ_TILE_STORE(2, first + HALF, 64);
    KVQ_TILE_STORE(3, second + HALF, 64);
    if (block.end < cut.k) return;
    for (int r = 0; r < tile.rows; r++)
        for (int p = 0; p < pair.count; p++)
            write_panel(out, row + r, panel + p, l.out_features, {{load(first + p * KEPT + r * OUTPUTS)}});
}

}  // namespace

#endif
