// Stored rows as numbers; subtracted means are added back.
#pragma once

#include "../attend/work.h"

namespace {

// Decoder of the rows of K or V one after the other, which decodes a block's mean once.
struct Stored {
    const KvqRows& rows;
    float* mean;  // [dim] of block `of`
    int64_t of;

    Stored(const KvqRows& rows, float* mean) : rows(rows), mean(mean), of(-1) {}

    void read(float* x, int64_t block, int offset) {
        read_row(x, rows, block, 0, offset);
        if (!rows.means) return;
        if (of != block) read_row(mean, *rows.means, of = block, 0, 0);
        for (int i = 0; i < rows.dim; i++) x[i] += mean[i];
    }
};

// A query's two parts, for latents and for rotary keys, scaled, and rotated like the rows; a value that is not
// finite makes all of it NaN.
inline void read_parts(const Call& call, const Task& task, int row, float* latent, float* rotary) {
    const KvqRows &v = call.layer.v, &k = call.layer.k;
    const uint8_t* from = row_of(call, task, call.q, row);
    read_floats(latent, from, v.dim, call.q.code);
    read_floats(rotary, from + (int64_t)v.dim * bytes_of(call.q.code), k.dim, call.q.code);
    if (v.rotated) rotate(latent, v.dim);
    if (k.rotated) rotate(rotary, k.dim);
    float bad = 0;
    for (int i = 0; i < v.dim; i++) bad += latent[i] * 0.0f;
    for (int i = 0; i < k.dim; i++) bad += rotary[i] * 0.0f;
    float scale = bad == 0 ? call.options.scale : __builtin_nanf("");
    for (int i = 0; i < v.dim; i++) latent[i] *= scale;
    for (int i = 0; i < k.dim; i++) rotary[i] *= scale;
}

// The place of a tile: the keys [skip, keys) of those from position `at` on.
struct Span {
    int at, skip, keys;
    Cursor here;
};

// Call `each(span)` for the tiles of a split, after prefetching the rows of the next tile.
template <class Each>
inline void for_tiles(const Call& call, const Task& task, int split, Each each) {
    Seen seen = seen_by(call, task);
    int begin = split * SPLIT, end = begin + SPLIT < seen.high ? begin + SPLIT : seen.high;
    if (seen.low > begin) begin = seen.low < end ? seen.low / TILE * TILE : end;  // older blocks may be gone
    for (int at = begin; at < end; at += TILE) {
        int keys = end - at < TILE ? end - at : TILE, skip = seen.low > at ? seen.low - at : 0, next = at + TILE;
        if (next < seen.high) {
            int count = seen.high - next < TILE ? seen.high - next : TILE;
            Cursor there(call.layer, call.batch, task.sequence, next);
            for (int i = 0; i < count; i++, there.skip(1)) {
                prefetch_row(call.layer.v, *there.entry, 0, there.offset);
                prefetch_row(call.layer.k, *there.entry, 0, there.offset);
            }
        }
        each(Span{at, skip, keys, Cursor(call.layer, call.batch, task.sequence, at + skip)});
    }
}

}  // namespace
