// Latent attention by products of bf16 tiles (Intel's AMX). Numbers that bf16 can't represent are sums of two bf16
// numbers: queries and weights always, stored rows if their scales are per group; codes of FP8 and INT8 are exact, and
// their scales multiply scores and weights. The error is below 2^-16 of a product.
#pragma once

#include "tile_rows.h"

#if defined(KVQ_TILES)

namespace {

// Tiles 0 to 3, [16 keys, 16 rows] each, += keys of a tile times queries [blocks][16 pairs][16 rows][2].
inline void add_products(const TileRows& t, const bf16* q, const bf16* low_q) {
    for (int block = 0; block < t.blocks; block++) {
        const bf16* keys = t.keys + (int64_t)block * BLOCK;
        KVQ_TILE_LOAD(4, q + (int64_t)block * TILE_SIZE, 64);
        KVQ_TILE_LOAD(5, low_q + (int64_t)block * TILE_SIZE, 64);
        KVQ_TILE_LOAD(6, keys, 64);
        KVQ_TILE_ADD(0, 6, 4);
        KVQ_TILE_LOAD(7, keys + TILE_SIZE, 64);
        KVQ_TILE_ADD(1, 7, 4);
        KVQ_TILE_ADD(0, 6, 5);
        KVQ_TILE_ADD(1, 7, 5);
        KVQ_TILE_LOAD(6, keys + 2 * TILE_SIZE, 64);
        KVQ_TILE_ADD(2, 6, 4);
        KVQ_TILE_LOAD(7, keys + 3 * TILE_SIZE, 64);
        KVQ_TILE_ADD(3, 7, 4);
        KVQ_TILE_ADD(2, 6, 5);
        KVQ_TILE_ADD(3, 7, 5);
        if (t.is_exact) continue;
        keys = t.low_keys + (int64_t)block * BLOCK;
        KVQ_TILE_LOAD(6, keys, 64);
        KVQ_TILE_ADD(0, 6, 4);
        KVQ_TILE_LOAD(7, keys + TILE_SIZE, 64);
        KVQ_TILE_ADD(1, 7, 4);
        KVQ_TILE_LOAD(6, keys + 2 * TILE_SIZE, 64);
        KVQ_TILE_ADD(2, 6, 4);
        KVQ_TILE_LOAD(7, keys + 3 * TILE_SIZE, 64);
        KVQ_TILE_ADD(3, 7, 4);
    }
}

// Store tiles 0 to 3 in x [TILE, 16], and set the tiles to zero.
inline void store_products(float* x) {
    KVQ_TILE_STORE(0, x, 64);
    KVQ_TILE_STORE(1, x + 256, 64);
    KVQ_TILE_STORE(2, x + 512, 64);
    KVQ_TILE_STORE(3, x + 768, 64);
    zero_sums();
}

struct TileScratch {
    float* row;                                   // that is written
    float* queries;                               // 16, latent and rotary parts side by side
    bf16 *latent_q, *low_latent_q;                // [rows / 16][v blocks][16 pairs][16 rows][2]
    bf16 *rotary_q, *low_rotary_q;                // the same for k blocks
    TileRows latent, rotary;
    float *products, *rotary_products;            // [TILE, 16]
    bf16 *weights, *low_weights;                  // [2][16 rows][32 keys]
    float* scores;                                // [rows, TILE], then weights
    Running running;
    Partial run, sum;
};

struct TileLatent {
    typedef TileScratch Scratch;

    static Scratch take(const Call& call, Memory& memory) {
        Scratch s;
        int64_t rows = (call.rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        s.row = memory.take<float>(call.v_width);
        s.queries = memory.take<float>((int64_t)TILE_ROWS * (call.v_width + call.k_width));
        s.latent_q = memory.take<bf16>(rows * call.v_width);
        s.low_latent_q = memory.take<bf16>(rows * call.v_width);
        s.rotary_q = memory.take<bf16>(rows * call.k_width);
        s.low_rotary_q = memory.take<bf16>(rows * call.k_width);
        s.latent = take_tile_rows(call.layer.v, call.v_width, true, memory);
        s.rotary = take_tile_rows(call.layer.k, call.k_width, false, memory);
        s.products = memory.take<float>(TILE * TILE_ROWS);
        s.rotary_products = memory.take<float>(TILE * TILE_ROWS);
        s.weights = memory.take<bf16>(2 * TILE_SIZE);
        s.low_weights = memory.take<bf16>(2 * TILE_SIZE);
        s.scores = memory.take<float>(rows * TILE);
        s.running.decays = memory.take<float>(rows);
        s.running.totals = memory.take<float>(rows * W);
        s.run = take_partial(call, call.rows, memory);
        s.sum = take_partial(call, call.rows, memory);
        return s;
    }

    // A part of 16 queries, `stride` apart, whose pairs become columns of tiles.
    static KVQ_TILE_TARGET void put_queries(bf16* q, bf16* low_q, const float* x, int stride, int width) {
        for (int i = 0; i < width; i += TILE_PAIRS) {
            vf high[16], low[16];
            for (int r = 0; r < TILE_ROWS; r++) {
                const float* row = x + (int64_t)r * stride + i;
                Two two = two_of(load(row), load(row + W));
                high[r] = (vf)two.high, low[r] = (vf)two.low;
            }
            transpose(high);
            transpose(low);
            for (int j = 0; j < 16; j++) {
                store((float*)(q + (int64_t)i * TILE_ROWS + j * TILE_PAIRS), high[j]);
                store((float*)(low_q + (int64_t)i * TILE_ROWS + j * TILE_PAIRS), low[j]);
            }
        }
    }

    static void read(const Call& call, const Task& task, Scratch& s) {
        int stride = call.v_width + call.k_width;
        for (int row = 0; row < task.rows; row += TILE_ROWS) {
            memset(s.queries, 0, (size_t)TILE_ROWS * stride * 4);
            for (int r = 0; r < TILE_ROWS && row + r < task.rows; r++)
                read_parts(call, task, row + r, s.queries + r * stride, s.queries + r * stride + call.v_width);
            int64_t latent = (int64_t)row * call.v_width, rotary = (int64_t)row * call.k_width;
            put_queries(s.latent_q + latent, s.low_latent_q + latent, s.queries, stride, call.v_width);
            put_queries(s.rotary_q + rotary, s.low_rotary_q + rotary, s.queries + call.v_width, stride, call.k_width);
        }
    }

    // Compute the scores of 16 rows.
    static void score(const Call& call, Scratch& s, int row) {
        int64_t latent = (int64_t)row * call.v_width, rotary = (int64_t)row * call.k_width;
        bool together = !s.latent.is_scaled && !s.rotary.is_scaled;
        add_products(s.latent, s.latent_q + latent, s.low_latent_q + latent);
        if (!together) store_products(s.products);
        add_products(s.rotary, s.rotary_q + rotary, s.low_rotary_q + rotary);
        store_products(s.rotary_products);
        for (int key = 0; key < TILE; key += 16) {
            vf x[16];
            for (int i = 0; i < 16; i++) {
                x[i] = load(s.rotary_products + (key + i) * TILE_ROWS);
                if (together) continue;
                x[i] = x[i] * s.rotary.scales[key + i] +
                       load(s.products + (key + i) * TILE_ROWS) * s.latent.scales[key + i];
            }
            transpose(x);
            for (int i = 0; i < 16; i++) store(s.scores + (row + i) * TILE + key, x[i]);
        }
    }

    // out of 16 rows = out * decays + weights . values
    static KVQ_TILE_TARGET void add_values(const Call& call, const Task& task, Scratch& s, int row) {
        float* out = s.run.out + (int64_t)row * call.v_width;
        for (int r = 0; r < TILE_ROWS; r++) {
            bool exists = row + r < task.rows;
            float decay = exists ? s.running.decays[row + r] : 1;
            if (decay != 1)
                for (int i = 0; i < call.v_width; i += W)
                    store(out + r * call.v_width + i, load(out + r * call.v_width + i) * all(decay));
            for (int half = 0; half < 2; half++) {
                const float *x = s.scores + (row + r) * TILE + half * 32, *scale = s.latent.scales + half * 32;
                Two two = {};
                if (exists) two = two_of(load(x) * load(scale), load(x + W) * load(scale + W));
                _mm512_storeu_si512(s.weights + half * TILE_SIZE + r * TILE_PAIRS, two.high);
                _mm512_storeu_si512(s.low_weights + half * TILE_SIZE + r * TILE_PAIRS, two.low);
            }
        }
        KVQ_TILE_LOAD(2, s.weights, 64);
        KVQ_TILE_LOAD(3, s.weights + TILE_SIZE, 64);
        KVQ_TILE_LOAD(4, s.low_weights, 64);
        KVQ_TILE_LOAD(5, s.low_weights + TILE_SIZE, 64);
        int stride = call.v_width * 4, half = (TILE / 2) * TILE_PAIRS;
        for (int block = 0; block < s.latent.blocks; block++) {
            const bf16* v = s.latent.values + (int64_t)block * BLOCK;
            float* to = out + block * TILE_PAIRS;
            KVQ_TILE_LOAD(0, to, stride);
            KVQ_TILE_LOAD(1, to + 16, stride);
            KVQ_TILE_LOAD(6, v, 64);
            KVQ_TILE_ADD(0, 2, 6);
            KVQ_TILE_LOAD(7, v + half, 64);
            KVQ_TILE_ADD(1, 2, 7);
            KVQ_TILE_ADD(0, 4, 6);
            KVQ_TILE_ADD(1, 4, 7);
            KVQ_TILE_LOAD(6, v + TILE_SIZE, 64);
            KVQ_TILE_ADD(0, 3, 6);
            KVQ_TILE_LOAD(7, v + half + TILE_SIZE, 64);
            KVQ_TILE_ADD(1, 3, 7);
            KVQ_TILE_ADD(0, 5, 6);
            KVQ_TILE_ADD(1, 5, 7);
            if (!s.latent.is_exact) {
                v = s.latent.low_values + (int64_t)block * BLOCK;
                KVQ_TILE_LOAD(6, v, 64);
                KVQ_TILE_ADD(0, 2, 6);
                KVQ_TILE_LOAD(7, v + half, 64);
                KVQ_TILE_ADD(1, 2, 7);
                KVQ_TILE_LOAD(6, v + TILE_SIZE, 64);
                KVQ_TILE_ADD(0, 3, 6);
                KVQ_TILE_LOAD(7, v + half + TILE_SIZE, 64);
                KVQ_TILE_ADD(1, 3, 7);
            }
            KVQ_TILE_STORE(0, to, stride);
            KVQ_TILE_STORE(1, to + 16, stride);
        }
        zero_sums();
    }

    static void ask(const Call&, const Task&, int) {}
    static void run(const Call& call, const Task& task, Scratch& s, int split) {
        int rows = (task.rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        start(s.run, task.rows, call.v_width);
        memset(s.run.out, 0, (size_t)rows * call.v_width * 4);
        memset(s.running.totals, 0, (size_t)task.rows * W * 4);
        Stored latents(call.layer.v, s.latent.mean), rotary(call.layer.k, s.rotary.mean);
        begin_tiles();
        zero_sums();
        for_tiles(call, task, split, [&](Span span) {
            fill_tile(s.latent, latents, span);
            fill_tile(s.rotary, rotary, span);
            for (int row = 0; row < rows; row += TILE_ROWS) score(call, s, row);
            weigh_tile(call, task, s.scores, s.run, s.running, span.at, span.skip, span.keys);
            for (int row = 0; row < rows; row += TILE_ROWS) add_values(call, task, s, row);
        });
        end_tiles();
        for (int r = 0; r < task.rows; r++) s.run.total[r] = sum(load(s.running.totals + r * W));
    }
};

}  // namespace

#endif
