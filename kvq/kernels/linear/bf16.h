// Products of bf16 rows with weights in bf16, by instructions that multiply pairs of adjacent columns (native/amx.h).
//
// On one CPU, all rows use the same instructions, for few rows or many, as these differ in their sums: tiles sum 32
// columns as a chain of even and one of odd products, and add both; pairs are one chain. Both flush denormal numbers.
#pragma once

#include "tiles.h"
#include "../native/amx.h"

#if defined(KVQ_TILES)

namespace {

constexpr int PAIR_CHAINS = 24;
constexpr int MATRIX_BLOCK = 2 * TILE_SIZE;      // numbers of such a tile's 32 columns
static_assert(MATRIX_ROWS == 2 * TILE_ROWS, "two of them hold a tile's rows");
constexpr int FEW_MATRIX_PANELS = 4;             // multiplied with up to 16 rows at a time; with more, half as many

// Inputs of a tile of rows: [k / 2, rows] words of two columns.
inline void pair_rows(const Tile& tile, const KvqLinear& l, const uint8_t* x, int64_t x_row) {
    int whole = (int)(l.in_features / 2);
    for (int r = 0; r < tile.rows; r++, x += x_row) {
        int32_t* to = tile.words + r;
        for (int i = 0; i < whole; i++) to[(int64_t)i * tile.rows] = load_as<int32_t>(x + i * 4);
        for (int i = whole; i < l.k / 2; i++) to[(int64_t)i * tile.rows] = 0;
        if (l.in_features % 2) to[(int64_t)whole * tile.rows] = load_as<uint16_t>(x + whole * 4);
    }
}

// The same as matrices: [k / 32][2][16 rows][32 columns], with zeros for missing rows.
inline void matrix_rows(const Tile& tile, const KvqLinear& l, const uint8_t* x, int64_t x_row) {
    constexpr int BYTES = TILE_PAIRS * 2;
    int rows = tile.rows <= TILE_ROWS ? TILE_ROWS : MATRIX_ROWS;  // that are read
    for (int r = 0; r < rows; r++, x += x_row) {
        uint8_t* to = (uint8_t*)tile.words + r * BYTES;
        for (int at = 0; at < l.k; at += TILE_PAIRS, to += MATRIX_BLOCK * 2) {
            int64_t left = r < tile.rows ? l.in_features - at : 0;
            if (left >= TILE_PAIRS) {
                memcpy(to, x + at * 2, BYTES);
                continue;
            }
            memset(to, 0, BYTES);
            if (left > 0) memcpy(to, x + at * 2, (size_t)left * 2);
        }
    }
}

template <int R, int P>
KVQ_TILE_TARGET void pair_tile(const KvqLinear& l, const Cut& cut, const Tile& tile, int64_t panel, const Output& out,
                               int64_t row, const Block& block) {
    constexpr int BYTES = OUTPUTS * 2;
    int64_t bytes = (int64_t)cut.k * BYTES;
    const uint8_t* codes = l.codes + panel * bytes + (int64_t)block.begin * BYTES;
    const int32_t* x = tile.words + (int64_t)block.begin / 2 * R;
    __m512 totals[P][R];
    UNROLL for (int p = 0; p < P; p++)
        UNROLL for (int r = 0; r < R; r++)
            totals[p][r] = block.begin ? (__m512)load(block.kept + (p * R + r) * W) : __m512{};
    for (int k = block.begin; k < block.end; k += 2, codes += 64, x += R) {
        __m512bh w[P];
        UNROLL for (int p = 0; p < P; p++) {
            w[p] = (__m512bh)_mm512_loadu_si512(codes + p * bytes);
            __builtin_prefetch(codes + p * bytes + AHEAD);
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int p = 0; p < P; p++)
                totals[p][r] = _mm512_dpbf16_ps(totals[p][r], w[p], (__m512bh)_mm512_set1_epi32(x[r]));
    }
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) {
            Floats total;
            total.part[0] = (vf)totals[p][r];
            if (block.end < cut.k)
                store(block.kept + (p * R + r) * W, total.part[0]);
            else
                write_panel(out, row + r, panel + p, l.out_features, total);
        }
}

// The factors of a few panels: `x` at the block's first column, `kept` [panels][rows][16].
struct MatrixStep {
    const uint8_t *x, *codes[FEW_MATRIX_PANELS];
    float* kept[FEW_MATRIX_PANELS];
    int columns;
};

// Load the next tile of a panel that is read once, and prefetch further tiles.
KVQ_PREFETCHES const uint8_t* passed(const uint8_t* codes) {
    for (int i = 0; i < 1024; i += 64) __builtin_prefetch(codes + AHEAD + i);
    return codes + 1024;
}

// Tiles 0 to 3: up to 16 rows times four panels.
inline void few_rows(const MatrixStep& s) {
    const uint8_t *x = s.x, *a = s.codes[0], *b = s.codes[1], *c = s.codes[2], *d = s.codes[3];
    for (int k = 0; k < s.columns; k += TILE_PAIRS, x += MATRIX_BLOCK * 2) {
        KVQ_TILE_LOAD(4, x, 64);
        KVQ_TILE_LOAD(5, a, 64);
        KVQ_TILE_ADD(0, 4, 5);
        KVQ_TILE_LOAD(6, b, 64);
        KVQ_TILE_ADD(1, 4, 6);
        KVQ_TILE_LOAD(7, c, 64);
        KVQ_TILE_ADD(2, 4, 7);
        KVQ_TILE_LOAD(5, d, 64);
        KVQ_TILE_ADD(3, 4, 5);
        a = passed(a), b = passed(b), c = passed(c), d = passed(d);
    }
}

// Tiles 0 to 3: 32 rows times two panels.
inline void many_rows(const MatrixStep& s) {
    const uint8_t *x = s.x, *a = s.codes[0], *b = s.codes[1];
    for (int k = 0; k < s.columns; k += TILE_PAIRS, x += MATRIX_BLOCK * 2, a += 1024, b += 1024) {
        KVQ_TILE_LOAD(4, x, 64);
        KVQ_TILE_LOAD(6, a, 64);
        KVQ_TILE_ADD(0, 4, 6);
        KVQ_TILE_LOAD(7, b, 64);
        KVQ_TILE_ADD(1, 4, 7);
        KVQ_TILE_LOAD(5, x + 1024, 64);
        KVQ_TILE_ADD(2, 5, 6);
        KVQ_TILE_ADD(3, 5, 7);
    }
}

// Sums of two whole panels, in bf16.
KVQ_TILE_TARGET inline void write_two(const Output& out, int64_t row, int64_t panel, int rows, const float* a,
                                      const float* b) {
    uint8_t* to = out.data + row * out.row + panel * OUTPUTS * 2;
    for (int r = 0; r < rows; r++, to += out.row, a += OUTPUTS, b += OUTPUTS)
        _mm512_storeu_si512(to, (reg)_mm512_cvtne2ps_pbh((__m512)load(b), (__m512)load(a)));
}

// Panels [panel, last) times one tile of rows; sums are kept between blocks, and until they are stored at the end.
// D158: AMX for one row as for many
inline void matrix_tile(const KvqLinear& l, const Cut& cut, const Tile& tile, int64_t panel, int64_t last,
                        const Output& out, int64_t row, const Block& block) {
    constexpr int64_t KEPT = MATRIX_ROWS * OUTPUTS;
    bool few = tile.rows <= TILE_ROWS;
    int step = few ? FEW_MATRIX_PANELS : FEW_MATRIX_PANELS / 2;
    int64_t bytes = (int64_t)cut.k * OUTPUTS * 2;
    float* kept = block.kept;
    for (; panel < last; panel += step, kept += step * KEPT) {
        MatrixStep s = {(const uint8_t*)tile.words + (int64_t)block.begin / TILE_PAIRS * MATRIX_BLOCK * 2, {}, {},
                        block.end - block.begin};
        int count = last - panel < step ? (int)(last - panel) : step;
        for (int p = 0; p < FEW_MATRIX_PANELS; p++) {  // missing panels are multiplied like the last one
            int own = p < count ? p : count - 1;
            s.codes[p] = l.codes + (panel + own) * bytes + (int64_t)block.begin * OUTPUTS * 2;
            s.kept[p] = kept + own * KEPT;
        }
        constexpr int64_t HALF = TILE_ROWS * OUTPUTS;
        float* to[4] = {s.kept[0], s.kept[1], few ? s.kept[2] : s.kept[0] + HALF, few ? s.kept[3] : s.kept[1] + HALF};
        if (block.begin) {
            KVQ_TILE_LOAD(0, to[0], 64);
            KVQ_TILE_LOAD(1, to[1], 64);
            KVQ_TILE_LOAD(2, to[2], 64);
            KVQ_TILE_LOAD(3, to[3], 64);
        } else {
            zero_sums();
        }
        few ? few_rows(s) : many_rows(s);
        KVQ_TILE_STORE(0, to[0], 64);
        KVQ_TILE_STORE(1, to[1], 64);
        KVQ_TILE_STORE(2, to[2], 64);
        KVQ_TILE_STORE(3, to[3], 64);
        if (block.end < cut.k) continue;
        int p = 0;
        for (; !out.around && p + 2 <= count && (panel + p + 2) * OUTPUTS <= l.out_features; p += 2)
            write_two(out, row, panel + p, tile.rows, kept + p * KEPT, kept + (p + 1) * KEPT);
        for (; p < count; p++)
            for (int r = 0; r < tile.rows; r++)
                write_panel(out, row + r, panel + p, l.out_features, {{load(kept + p * KEPT + r * OUTPUTS)}});
    }
}

}  // namespace

#endif
