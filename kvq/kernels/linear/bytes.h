// Products of many rows with weights in integer codes by tiles of bytes (native/amx.h).
//
// Sums of a segment are exact, and float arithmetic is that of integer_tile: a row has the same bits either way.
#pragma once

#include "tiles.h"
#include "../native/amx.h"

namespace {

constexpr int few_byte_rows(int code) { return code == KVQ_INT4 ? 10 : 6; }  // up to this many are as fast without

}  // namespace

#if defined(KVQ_TILES)

namespace {

constexpr int BYTE_COLUMNS = 64;  // of a tile
constexpr int BYTE_PANELS = 2;    // multiplied at a time
constexpr int BYTE_TILE = 1024;
static_assert(BYTE_ROWS == TILE_ROWS && BYTE_TILE == TILE_ROWS * BYTE_COLUMNS, "a tile's rows and bytes");

// Return whether every segment is whole tiles.
inline bool has_byte_tiles(const Cut& cut) {
    return cut.k % BYTE_COLUMNS == 0 && cut.group % BYTE_COLUMNS == 0;
}

// Return the codes as tiles: in the panel, or for nibbles in `made`, [panels][columns / 64][16][64].
struct BytePanels {
    const uint8_t* tiles[BYTE_PANELS];
    int count;
};

template <bool NIBBLES>
BytePanels byte_panels(const KvqLinear& l, const Cut& cut, int64_t panel, int64_t last, uint8_t* made) {
    BytePanels b = {{}, last - panel < BYTE_PANELS ? (int)(last - panel) : BYTE_PANELS};
    for (int p = 0; p < BYTE_PANELS; p++) {
        const uint8_t* codes = l.codes + (panel + (p < b.count ? p : 0)) * panel_bytes<NIBBLES>(cut);
        b.tiles[p] = NIBBLES ? made : codes;
        if (!NIBBLES) continue;
        for (int k = 0; k < cut.k; k += 8, codes += 64, made += 128) {
            Codes x = load_as<Codes>(codes);
            _mm512_storeu_si512(made, (reg)(x & 15));
            _mm512_storeu_si512(made + 64, (reg)(x >> 4));
        }
    }
    return b;
}

// Up to 16 rows times two panels: while a segment's sums are converted to floats, the next products are computed.
template <int PLANES>
void byte_tile(const KvqLinear& l, const Cut& cut, const Tile& tile, const BytePanels& panels, int64_t panel,
               const Output& out, int64_t row) {
    alignas(64) int32_t sums[2][BYTE_PANELS][PLANES][TILE_ROWS * OUTPUTS];
    int scale_bytes = OUTPUTS * bytes_of(l.scale_code);
    Floats totals[BYTE_PANELS][TILE_ROWS] = {};
    const uint8_t *x = (const uint8_t*)tile.words, *a = panels.tiles[0], *b = panels.tiles[1];
    auto multiply = [&](int segment) __attribute__((always_inline)) {
        zero_sums();
        for (int n = length_of(cut, segment); n > 0; n -= BYTE_COLUMNS) {
            KVQ_TILE_LOAD(4, x, 64);
            KVQ_TILE_LOAD(6, a, 64);
            KVQ_TILE_LOAD(7, b, 64);
            KVQ_TILE_ADD_BYTES(0, 4, 6);
            KVQ_TILE_ADD_BYTES(1, 4, 7);
            if constexpr (PLANES == 2) {
                KVQ_TILE_LOAD(5, x + BYTE_TILE, 64);
                KVQ_TILE_ADD_BYTES(2, 5, 6);
                KVQ_TILE_ADD_BYTES(3, 5, 7);
            }
            x += PLANES * BYTE_TILE, a += BYTE_TILE, b += BYTE_TILE;
        }
        auto& to = sums[segment % 2];
        KVQ_TILE_STORE(0, to[0][0], 64);
        KVQ_TILE_STORE(1, to[1][0], 64);
        if constexpr (PLANES == 2) {
            KVQ_TILE_STORE(2, to[0][1], 64);
            KVQ_TILE_STORE(3, to[1][1], 64);
        }
    };
    multiply(0);
    for (int s = 0; s < cut.segments; s++) {
        if (s + 1 < cut.segments) multiply(s + 1);
        int64_t group = s / cut.per_group, at = (int64_t)s * tile.rows;
        for (int p = 0; p < panels.count; p++) {
            int64_t own = (panel + p) * l.groups + group;
            vf scales = load_floats(l.scales + own * scale_bytes, l.scale_code).part[0], minus_zeros = {};
            if (l.zeros) minus_zeros = load_minus_zeros(l.zeros + own * OUTPUTS).part[0];
            for (int r = 0; r < tile.rows; r++) {
                const int32_t* starts = tile.starts + (at + r) * PLANES;
                vi high = load_as<vi>(sums[s % 2][p][0] + r * OUTPUTS) + starts[0];
                vf sum = floats(high);
                if (PLANES == 2) {
                    vi low = load_as<vi>(sums[s % 2][p][PLANES - 1] + r * OUTPUTS) + starts[PLANES - 1];
                    sum = multiply_add(floats(low), all(LOW_STEP), sum);
                }
                if (l.zeros) sum = multiply_add(minus_zeros, all(tile.sums[at + r]), sum);
                vf& total = totals[p][r].part[0];
                total = multiply_add(sum * tile.steps[at + r], scales, total);
            }
        }
    }
    for (int r = 0; r < tile.rows; r++)
        for (int p = 0; p < panels.count; p++) write_panel(out, row + r, panel + p, l.out_features, totals[p][r]);
}

}  // namespace

#endif
