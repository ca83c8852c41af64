// seal on CPUs: see reference.py, whose codes, scales and means these are, bit for bit.

#include "../native/encode.h"
#include "../native/pool.h"

namespace {

// Load row `slot` of a staged block for encoding: finite, and rotated if sealed rows are.
inline void read_prepared(float* x, const KvqRows& from, const KvqRows& into, int64_t block, int head, int slot) {
    read_row(x, from, block, head, slot);
    zero_not_finite(x, from.dim);
    rotate_row(x, into);
}

// Store the mean of a block's rows; `mean` gets its decoded value.
inline void seal_mean(float* mean, const KvqRows& from, const KvqRows& into, int64_t source, int64_t target, int head,
                      int block_size) {
    float x[MOST_DIM], total[MOST_DIM];
    read_prepared(total, from, into, source, head, 0);
    for (int slot = 1; slot < block_size; slot++) {
        read_prepared(x, from, into, source, head, slot);
        for (int i = 0; i < into.dim; i++) total[i] += x[i];
    }
    for (int i = 0; i < into.dim; i++) total[i] /= (float)block_size;
    zero_not_finite(total, into.dim);
    write_row(total, *into.means, target, head, 0);
    read_row(mean, *into.means, target, head, 0);
}

// Encode a block with per-channel scales.
inline void seal_channels(const KvqRows& from, const KvqRows& into, int64_t source, int64_t target, int head,
                          int block_size) {
    float x[MOST_DIM], low[MOST_DIM], high[MOST_DIM];
    read_prepared(low, from, into, source, head, 0);
    memcpy(high, low, (size_t)into.dim * 4);
    for (int slot = 1; slot < block_size; slot++) {
        read_prepared(x, from, into, source, head, slot);
        for (int i = 0; i < into.dim; i++) {
            low[i] = x[i] < low[i] ? x[i] : low[i];
            high[i] = x[i] > high[i] ? x[i] : high[i];
        }
    }
    uint8_t* scales = row_scales(into, target, head, 0);
    encode_channel_scales(scales, low, high, into);
    Channels channels;
    read_channels(channels, into, scales);
    for (int slot = 0; slot < block_size; slot++) {
        read_prepared(x, from, into, source, head, slot);
        encode_channel_row(row_codes(into, target, head, slot), x, channels, into);
    }
}

// Seal one KV head of one block. Rows that stay floats are copied as bytes.
inline void seal_rows(const KvqRows& from, const KvqRows& into, int64_t source, int64_t target, int head,
                      int block_size) {
    if (into.channels) return seal_channels(from, into, source, target, head, block_size);
    float x[MOST_DIM], mean[MOST_DIM];
    if (into.means) seal_mean(mean, from, into, source, target, head, block_size);
    for (int slot = 0; slot < block_size; slot++) {
        if (into.code == from.code && !into.rotated) {
            memcpy(row_codes(into, target, head, slot), row_codes(from, source, head, slot),
                   (size_t)from.dim * bytes_of(from.code));
            continue;
        }
        read_prepared(x, from, into, source, head, slot);
        for (int i = 0; into.means && i < into.dim; i++) x[i] -= mean[i];
        write_row(x, into, target, head, slot);
    }
}

}  // namespace

// `moves`: [count, 3], a block of `recent`, its target block, and whether the target is in `sinks` (which may be null
// if none is) or in `sealed`. Moves are checked before anything is written; no two may have the same target.
KVQ_KERNEL(seal)(const KvqLayer* recent, const KvqLayer* sealed, const KvqLayer* sinks, const int64_t* moves,
                 int64_t count, int threads) {
    for (const int64_t* move = moves; move < moves + 3 * count; move += 3) {
        int64_t most = (move[2] ? sinks : sealed)->num_blocks;
        if (move[0] < 0 || move[0] >= recent->num_blocks || move[1] < 0 || move[1] >= most) return KVQ_BAD_BLOCK;
    }
    int heads = recent->kv_heads;
    run_tasks(threads, count * heads, 1, [=](int, int64_t task) {
        const int64_t* move = moves + task / heads * 3;
        const KvqLayer& into = *(move[2] ? sinks : sealed);
        int head = (int)(task % heads);
        seal_rows(recent->k, into.k, move[0], move[1], head, recent->block_size);
        seal_rows(recent->v, into.v, move[0], move[1], head, recent->block_size);
    });
    return KVQ_OK;
}
