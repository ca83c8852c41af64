// Scales and minimums of a tile's rows, transposed: a register contains those of one group of W keys.
#pragma once

#include "integers.h"

#if defined(KVQ_INTEGER)

namespace {

// Transpose [TILE, N] numbers into columns [N, TILE], of scales and minimums alternately.
template <int N>
inline void spread_scales(const Tile& tile, const float* from) {
    for (int key = 0; key < TILE; key += W) {
        vf x[N];
        for (int i = 0; i < N; i++) x[i] = load(from + key * N + i * W);
        transpose<N>(tile.scales + key, TILE, x);
    }
}

inline void spread_scales(const Tile& tile, const float* from, int n) {
    if (n == 2) return spread_scales<2>(tile, from);
    if (n == 4) return spread_scales<4>(tile, from);
    if (n == 8) return spread_scales<8>(tile, from);
    for (int key = 0; key < TILE; key++)
        for (int i = 0; i < n; i++) tile.scales[i * TILE + key] = from[key * n + i];
}

KVQ_PREFETCHES void prefetch_scales(const KvqRows& rows, Cursor cursor, int head, int keys) {
    if (!rows.scales) return;
    for (int i = 0; i < keys;) {
        int count = cursor.run(keys - i);
        const uint8_t* from = row_scales(rows, *cursor.entry, head, cursor.offset);
        for (int64_t j = 0; j < count * rows.scales_slot; j += 64) __builtin_prefetch(from + j);
        i += count;
        cursor.skip(count);
    }
}

// Rows whose codes are all 0 get scales of 0, so that their scales don't affect the largest
// product with a weight. Attention sinks may have such rows of V, with nearly all of the weight.
// D95: rows of zeros don't affect the scale
inline void drop_zero_rows(const Tile& tile, const KvqRows& rows, const Cut& cut, int skip, int keys) {
    const float least = rows.narrow ? narrow_scale(LEAST_NARROW) : SMALLEST_SCALE;
    vf nearest = all(-1.0f);  // to 0, of the scales that are not 0, negated
    for (int i = 0; i < TILE; i += W) {
        vf x = load(tile.scales + i);
        nearest = maximum(nearest, x > vf{} ? -x : all(-1.0f));
    }
    bool any = largest(nearest) >= -least;
    for (int i = skip; any && i < keys; i++) {
        uint8_t seen = 0;
        for (int j = 0; j < cut.row_bytes; j++) seen |= tile.rows[i][j];
        for (int g = 0; seen == 0 && g < cut.groups; g++) tile.scales[g * tile.stride + i] = 0;
    }
}

// Scales and minimums of one group of W keys, from words with the two bytes from bit SHIFT on.
template <int SHIFT>
// D97: two groups' bytes per word, transposed by one shuffle
inline void decode_pairs(const Tile& tile, int group, int key, vi words, float step) {
    vi bits = ((words >> SHIFT & 255) << 20) + (107 << 23);
    vf scale = load_as<vf>(&bits);
    store(tile.scales + group * tile.stride + key, scale);
    store(tile.minimums + group * tile.stride + key, floats(words << (16 - SHIFT) >> 24) * step * scale);
}

// [TILE, 2 N] pairs of bytes, two to a word, by group.
template <int N>
inline void spread_pairs(const Tile& tile, const uint8_t* from, float step) {
    for (int key = 0; key < TILE; key += W) {
        vi x[N], columns[N];
        for (int i = 0; i < N; i++) x[i] = load_as<vi>(from + (key * N + i * W) * 4);
        transpose<N>(columns, 1, x);
        for (int i = 0; i < N; i++) {
            decode_pairs<0>(tile, 2 * i, key, columns[i], step);
            decode_pairs<16>(tile, 2 * i + 1, key, columns[i], step);
        }
    }
}

// The same for any number of groups.
inline void spread_pairs(const Tile& tile, const uint8_t* from, int groups, float step) {
    if (groups == 2) return spread_pairs<1>(tile, from, step);
    if (groups == 4) return spread_pairs<2>(tile, from, step);
    if (groups == 8) return spread_pairs<4>(tile, from, step);
    for (int key = 0; key < TILE; key += W)
        for (int g = 0; g < groups; g++) {
            vi words;
            for (int i = 0; i < W; i++) words[i] = ((const uint16_t*)from)[(key + i) * groups + g];
            decode_pairs<0>(tile, g, key, words, step);
        }
}

// Bytes of narrow scales and minimums of rows that are not read: products with them are ignored, and they
// differ from the scales of rows whose codes are all 0.
constexpr uint8_t UNREAD = 0x78;

// The pairs of bytes of one row.
inline void copy_pairs(uint8_t* to, const uint8_t* from, int groups) {
    if (groups == 2)
        memcpy(to, from, 4);
    else if (groups == 4)
        memcpy(to, from, 8);
    else
        for (int i = 0; i < 2 * groups; i++) to[i] = from[i];
}

// Narrow scales and minimums of the rows [skip, keys) by group.
inline void read_narrow_scales(const Tile& tile, float* scratch, const KvqRows& rows, const Cut& cut, Cursor cursor,
                               int head, int skip, int keys) {
    int n = 2 * cut.groups;
    uint8_t* to = (uint8_t*)scratch;  // rows of all blocks, contiguous
    memset(to, UNREAD, (size_t)skip * n);
    memset(to + keys * n, UNREAD, (size_t)(TILE - keys) * n);
    for (int i = skip; i < keys;) {
        int count = cursor.run(keys - i);
        const uint8_t* from = row_scales(rows, *cursor.entry, head, cursor.offset);
        if (rows.scales_slot == n && count > 1)
            memcpy(to + i * n, from, (size_t)count * n);
        else
            for (int j = 0; j < count; j++) copy_pairs(to + (i + j) * n, from + j * rows.scales_slot, cut.groups);
        i += count;
        cursor.skip(count);
    }
    spread_pairs(tile, to, cut.groups, narrow_step(rows.bits));
}

// Scales and minimums of the rows [skip, keys) by group; zeros for the other rows.
inline void read_wide_scales(const Tile& tile, float* scratch, const KvqRows& rows, const Cut& cut, Cursor cursor,
                             int head, int skip, int keys) {
    int n = cut.is_grouped ? 2 * cut.groups : 1;
    float* to = n == 1 ? tile.scales : scratch;
    for (int i = 0; i < skip * n; i++) to[i] = 0;
    for (int i = keys * n; i < TILE * n; i++) to[i] = 0;
    for (int i = skip; i < keys;) {
        int count = cursor.run(keys - i);
        const uint8_t* from = row_scales(rows, *cursor.entry, head, cursor.offset);
        if (rows.scales_slot == 2 * n)
            read_fp16(to + i * n, (const uint16_t*)from, count * n);
        else
            for (int j = 0; j < count; j++)
                read_fp16(to + (i + j) * n, (const uint16_t*)(from + j * rows.scales_slot), n);
        i += count;
        cursor.skip(count);
    }
    if (n > 1) spread_scales(tile, scratch, n);
}

// The same for either kind; `scratch` has room for a tile's stored scales.
inline void read_scales(const Tile& tile, float* scratch, const KvqRows& rows, const Cut& cut, Cursor cursor,
                        int head, int skip, int keys) {
    if (!rows.scales) {
        for (int i = 0; i < TILE; i++) tile.scales[i] = i >= skip && i < keys ? rows.static_scales[head] : 0.0f;
        return;
    }
    (rows.narrow ? read_narrow_scales : read_wide_scales)(tile, scratch, rows, cut, cursor, head, skip, keys);
}

}  // namespace
#endif
