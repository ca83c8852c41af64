// Products of query rows with a tile of K, and of weights with a tile of V, both decoded to fp32.
#pragma once

#include "task.h"

namespace {

// D93: GCC 12 drops calls that only prefetch
KVQ_PREFETCHES void prefetch_row(const KvqRows& rows, int64_t block, int head, int offset) {
    const uint8_t* codes = row_codes(rows, block, head, offset);
    for (int64_t i = 0; i < rows.codes_slot; i += 64) __builtin_prefetch(codes + i);
    if (rows.scales) __builtin_prefetch(row_scales(rows, block, head, offset));
}

// Decode the rows [skip, keys) from `here` on into their places in `tile`, [TILE, width], and prefetch
// `next_keys` rows from `there` on: blocks are anywhere, so hardware can't predict the next one.
inline void read_tile(float* tile, const KvqRows& rows, Cursor here, Cursor there, int head, int width, int skip,
                      int keys, int next_keys) {
    Channels channels;
    for (int i = skip; i < keys; i++, here.skip(1)) {
        float* x = tile + (int64_t)i * width;
        if (rows.channels) {
            if (i == skip || here.offset == 0) read_channels(channels, rows, row_scales(rows, *here.entry, head, 0));
            read_channel_row(x, row_codes(rows, *here.entry, head, here.offset), channels, rows);
        } else {
            read_row(x, rows, *here.entry, head, here.offset);
        }
        for (int j = rows.dim; j < width; j++) x[j] = 0;
        if (i - skip >= next_keys) continue;
        prefetch_row(rows, *there.entry, head, there.offset);
        there.skip(1);
    }
}

// scores[key] = q . tile[key] for `keys` keys, rounded up to whole vectors; the rest is garbage.
inline void float_scores(float* scores, const float* q, const float* tile, int width, int keys) {
    for (int key = 0; key < keys; key += W) {
        const float* k = tile + (int64_t)key * width;
        vf sums[W] = {};
        for (int i = 0; i < width; i += W) {
            vf x = load(q + i);
#pragma GCC unroll 16
            for (int j = 0; j < W; j++) sums[j] += x * load(k + (int64_t)j * width + i);
        }
        store(scores + key, sums_of(sums));
    }
}

// Keys are transposed for this many query rows or more: elements are then adjacent, and no sum crosses lanes.
constexpr int TURNED_ROWS = 8;

// Transpose W rows of a tile into `turned` [width, W].
inline void turn_keys(float* turned, const float* tile, int width) {
    for (int i = 0; i < width; i += W, turned += W * W) {
        vf x[W];
        for (int j = 0; j < W; j++) x[j] = load(tile + (int64_t)j * width + i);
        transpose(x);
        for (int j = 0; j < W; j++) store(turned + j * W, x[j]);
    }
}

// Lane by lane the same as lane `lane` of float_scores's sums, for R rows over C times W transposed keys.
template <int R, int C>
inline void add_lane(vf sums[R][C], const float* q, const float* turned, int width, int lane) {
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sums[r][c] = vf{};
    for (int i = lane; i < width; i += W) {
        vf k[C];
        for (int c = 0; c < C; c++) k[c] = load(turned + ((int64_t)c * width + i) * W);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sums[r][c] += all(q[(int64_t)r * width + i]) * k[c];
    }
}

// float_scores of R rows over C times W transposed keys, with its bits: lanes are added in the order of `sums_of`.
template <int R, int C>
// D101: transposed keys: no sum crosses lanes
inline void turned_float_scores(float* scores, const float* q, const float* turned, int width) {
    vf quarters[W / 4][R][C];
    for (int at = 0; at < W / 4; at++) {
        vf a[R][C], b[R][C], c[R][C];
        add_lane<R, C>(a, q, turned, width, 4 * at);
        add_lane<R, C>(b, q, turned, width, 4 * at + 2);
        for (int r = 0; r < R; r++)
            for (int i = 0; i < C; i++) a[r][i] += b[r][i];
        add_lane<R, C>(b, q, turned, width, 4 * at + 1);
        add_lane<R, C>(c, q, turned, width, 4 * at + 3);
        for (int r = 0; r < R; r++)
            for (int i = 0; i < C; i++) quarters[at][r][i] = a[r][i] + (b[r][i] + c[r][i]);
    }
    for (int left = W / 8; left > 0; left /= 2)
        for (int at = 0; at < left; at++)
            for (int r = 0; r < R; r++)
                for (int i = 0; i < C; i++) quarters[at][r][i] = quarters[2 * at][r][i] + quarters[2 * at + 1][r][i];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < C; i++) store(scores + r * TILE + i * W, quarters[0][r][i]);
}

template <int C>
inline void turned_float_scores(float* scores, const float* q, int count, const float* turned, int width) {
    for (; count >= 4; count -= 4, scores += 4 * TILE, q += 4 * (int64_t)width)
        turned_float_scores<4, C>(scores, q, turned, width);
    if (count == 3) turned_float_scores<3, C>(scores, q, turned, width);
    if (count == 2) turned_float_scores<2, C>(scores, q, turned, width);
    if (count == 1) turned_float_scores<1, C>(scores, q, turned, width);
}

// float_scores of `count` query rows; `turned` has room for 2 W keys.
inline void all_float_scores(float* scores, const float* q, int count, const float* tile, int width, int keys,
                             float* turned) {
    if (count < TURNED_ROWS) {
        for (int r = 0; r < count; r++) float_scores(scores + r * TILE, q + (int64_t)r * width, tile, width, keys);
        return;
    }
    int key = 0;
    for (; key + W < keys; key += 2 * W, scores += 2 * W) {
        for (int i = 0; i < 2; i++) turn_keys(turned + (int64_t)i * W * width, tile + (int64_t)(key + i * W) * width, width);
        turned_float_scores<2>(scores, q, count, turned, width);
    }
    if (key >= keys) return;
    turn_keys(turned, tile + (int64_t)key * width, width);
    turned_float_scores<1>(scores, q, count, turned, width);
}

// out = out * decay + weights . tile for R rows; four vectors of each row stay in registers.
template <int R>
inline void float_values(float* out, const float* decays, const float* weights, const float* tile, int width,
                         int skip, int keys) {
    int i = 0;
    for (; i + 4 * W <= width; i += 4 * W) {
        vf sums[R][4];
        for (int r = 0; r < R; r++)
            for (int j = 0; j < 4; j++) sums[r][j] = load(out + (int64_t)r * width + i + j * W) * all(decays[r]);
        for (int key = skip; key < keys; key++)
            for (int j = 0; j < 4; j++) {
                vf v = load(tile + (int64_t)key * width + i + j * W);
                for (int r = 0; r < R; r++) sums[r][j] += v * weights[r * TILE + key];
            }
        for (int r = 0; r < R; r++)
            for (int j = 0; j < 4; j++) store(out + (int64_t)r * width + i + j * W, sums[r][j]);
    }
    for (; i < width; i += W)
        for (int r = 0; r < R; r++) {
            vf total = load(out + (int64_t)r * width + i) * all(decays[r]);
            for (int key = skip; key < keys; key++)
                total += load(tile + (int64_t)key * width + i) * weights[r * TILE + key];
            store(out + (int64_t)r * width + i, total);
        }
}

// Return true if rows are fp32 and have the layout of a tile in their blocks, so that they can be read in place.
inline bool lies_as_tile(const KvqLayer& layer, const KvqRows& rows) {
    return rows.code == KVQ_FP32 && rows.codes_slot == (int64_t)rows.dim * 4 && rows.dim % PAD == 0 &&
           layer.block_size % W == 0;
}

KVQ_PREFETCHES void prefetch_rows(const KvqRows& rows, Cursor there, int head, int keys) {
    for (int i = 0; i < keys; i++, there.skip(1)) prefetch_row(rows, *there.entry, head, there.offset);
}

// float_scores of `count` query rows over the keys [0, keys) of a tile, read from their blocks.
inline void scores_in_place(float* scores, const float* q, int count, const KvqRows& rows, Cursor here, int head,
                            int keys, float* turned) {
    for (int key = 0; key < keys;) {
        int run = here.run(keys - key);
        const float* k = (const float*)row_codes(rows, *here.entry, head, here.offset);
        all_float_scores(scores + key, q, count, k, rows.dim, run, turned);
        key += run;
        here.skip(run);
    }
}

// float_values of `count` query rows, up to 4 at a time.
inline void all_float_values(float* out, const float* decays, const float* weights, int count, const float* tile,
                             int width, int skip, int keys) {
    for (int r = 0; r < count; r += 4, out += 4 * (int64_t)width, weights += 4 * TILE, decays += 4) {
        if (count - r >= 4) float_values<4>(out, decays, weights, tile, width, skip, keys);
        if (count - r == 3) float_values<3>(out, decays, weights, tile, width, skip, keys);
        if (count - r == 2) float_values<2>(out, decays, weights, tile, width, skip, keys);
        if (count - r == 1) float_values<1>(out, decays, weights, tile, width, skip, keys);
    }
}

// The same over the keys [0, keys) of a tile, read from their blocks.
inline void values_in_place(float* out, const float* decays, const float* weights, int count, const KvqRows& rows,
                            Cursor here, int head, int keys) {
    float ones[ROWS];
    for (int r = 0; r < count; r++) ones[r] = 1;
    for (int key = 0; key < keys; decays = ones) {
        int run = here.run(keys - key);
        const float* v = (const float*)row_codes(rows, *here.entry, head, here.offset);
        all_float_values(out, decays, weights + key, count, v, rows.dim, 0, run);
        key += run;
        here.skip(run);
    }
}

}  // namespace
