// Latent attention by products of bf16 tiles (Intel's AMX). Numbers that bf16 can't hold are sums of two that it can:
// queries and weights always, stored rows where their scales go by groups; codes of FP8 and INT8 are exact, their
// scales multiply scores and weights. What is left out is below 2^-16 of a product.
#pragma once

#include "../native/amx.h"
#include "stored.h"

#if defined(KVQ_TILES)

namespace {

constexpr int BLOCK = TILE * TILE_PAIRS + 32;     // TILE keys of 32 elements; padded, or all lie in the same sets

inline int tile_width(int dim) { return (dim + TILE_PAIRS - 1) / TILE_PAIRS * TILE_PAIRS; }

// FP32 has more digits than two numbers of bf16 hold.
inline bool takes_tiles(const KvqLayer& layer) { return layer.k.code != KVQ_FP32 && layer.v.code != KVQ_FP32; }

// x as a sum of two numbers of bf16, 32 at a time.
struct Two {
    reg high, low;
};

KVQ_TILE_TARGET inline Two two_of(vf a, vf b) {
    reg high = (reg)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    vf top_a = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(high)), 16);
    vf top_b = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1)), 16);
    return {high, (reg)_mm512_cvtne2ps_pbh((__m512)(b - top_b), (__m512)(a - top_a))};
}

enum RowKind { ANY_ROW, BF16_ROW, FP8_ROW, INT8_ROW, INT4_ROW, INT4_G16_ROW };

// A stored row, 32 elements at a time. Each kind of code has such a reader; all but the last take rows of a multiple
// of 32 elements, without means.
struct Bf16Row {
    const uint8_t* codes;
    Bf16Row(Stored& stored, int64_t block, int offset, float*) : codes(row_codes(stored.rows, block, 0, offset)) {}
    float scale() const { return 1; }
    Two at(int i) const { return {_mm512_loadu_si512(codes + i * 64), reg{}}; }
};

inline float scale_of(const KvqRows& rows, int64_t block, int offset) {
    return rows.scales ? from_fp16(*(const uint16_t*)row_scales(rows, block, 0, offset)) : rows.static_scales[0];
}

struct Int8Row {
    const KvqRows& rows;
    const uint8_t* codes;
    float factor;
    Int8Row(Stored& stored, int64_t block, int offset, float*)
        : rows(stored.rows), codes(row_codes(rows, block, 0, offset)), factor(scale_of(rows, block, offset)) {}
    float scale() const { return factor; }
    KVQ_TILE_TARGET Two at(int i) const {
        const __m128i* p = (const __m128i*)(codes + i * 32);
        __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
        __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p + 1)));
        return {(reg)_mm512_cvtne2ps_pbh(b, a), reg{}};
    }
};

struct Fp8Row {
    const KvqRows& rows;
    const uint8_t* codes;
    float factor;
    Fp8Row(Stored& stored, int64_t block, int offset, float*)
        : rows(stored.rows), codes(row_codes(rows, block, 0, offset)), factor(scale_of(rows, block, offset)) {}
    float scale() const { return factor; }
    Two at(int i) const {  // E4M3FN's exponent and mantissa lie in bf16 as they are; see fp8_values
        reg code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(codes + i * 32)));
        reg magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
        reg sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8);
        reg x = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
        const reg small = _mm512_castsi128_si512(  // 0 to 7 times 2^-9
            _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
        x = _mm512_mask_permutexvar_epi16(x, _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, small);
        x = _mm512_mask_mov_epi16(x, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f)),
                                  _mm512_set1_epi16(0x7fc0));
        return {_mm512_or_si512(x, sign), reg{}};
    }
};

// Scales and minimums of a row's groups, in turn, as numbers; the same as pair_of gives.
inline void read_pairs(float* out, const KvqRows& rows, const uint8_t* scales, int groups) {
    for (int at = 0; at < 2 * groups; at += W) {
        __mmask16 there = 2 * groups - at >= W ? 0xffff : (1 << (2 * groups - at)) - 1;
        if (!rows.narrow) {
            __m256i half = _mm256_maskz_loadu_epi16(there, (const uint16_t*)scales + at);
            store(out + at, (vf)_mm512_cvtph_ps(half));
            continue;
        }
        __m128i bytes = _mm_maskz_loadu_epi8(there, scales + at);
        vi codes = (vi)_mm512_cvtepu8_epi32(bytes);
        vf scale = (vf)((codes << 20) + (107 << 23));
        vf minimum = floats((vi)_mm512_cvtepi8_epi32(bytes)) * narrow_step(rows.bits) * (vf)_mm512_moveldup_ps((__m512)scale);
        store(out + at, (vf)_mm512_mask_mov_ps((__m512)scale, 0xaaaa, (__m512)minimum));
    }
}

// A table of 16 numbers, in the lower half.
KVQ_TILE_TARGET inline Two half_of(vf x) {
    __m256i high = (__m256i)_mm512_cvtneps_pbh((__m512)x);
    vf top = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
    return {_mm512_castsi256_si512(high), _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh((__m512)(x - top)))};
}

// What the 16 codes of a group stand for is looked up. SMALL: groups of 16 elements, two to a block; else of a
// multiple of 32.
template <bool SMALL>
struct Int4Row {
    const uint8_t* codes;
    const float* pairs;
    int half, each, left;  // blocks of half a row; blocks of a group, and how many of it are left
    Two table;
    Int4Row(Stored& stored, int64_t block, int offset, float* room)
        : codes(row_codes(stored.rows, block, 0, offset)), pairs(room), half(stored.rows.dim / 2 / TILE_PAIRS),
          each(SMALL ? 1 : stored.rows.group_size / TILE_PAIRS), left(0), table() {
        const KvqRows& rows = stored.rows;
        read_pairs(room, rows, row_scales(rows, block, 0, offset), rows.dim / rows.group_size);
    }
    float scale() const { return 1; }
    vf next() {
        const vf CODES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        vf found = CODES * all(pairs[0]) + all(pairs[1]);
        pairs += 2;
        return found;
    }
    KVQ_TILE_TARGET Two at(int i) {  // in order
        if (SMALL) {
            vf first = next();
            table = two_of(first, next());
        } else if (!left--) {
            table = half_of(next());
            left = each - 1;
        }
        reg code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(codes + (i < half ? i : i - half) * 32)));
        code = i < half ? _mm512_and_si512(code, _mm512_set1_epi16(15)) : _mm512_srli_epi16(code, 4);
        if (SMALL) code = _mm512_mask_add_epi16(code, 0xffff0000, code, _mm512_set1_epi16(16));
        return {_mm512_permutexvar_epi16(code, table.high), _mm512_permutexvar_epi16(code, table.low)};
    }
};

struct AnyRow {
    float* x;
    AnyRow(Stored& stored, int64_t block, int offset, float* room) : x(room) {
        stored.read(x, block, offset);
        for (int i = stored.rows.dim; i % TILE_PAIRS; i++) x[i] = 0;
    }
    float scale() const { return 1; }
    KVQ_TILE_TARGET Two at(int i) const { return two_of(load(x + i * TILE_PAIRS), load(x + i * TILE_PAIRS + W)); }
};

inline RowKind kind_of(const KvqRows& rows) {
    if (rows.means || rows.dim % TILE_PAIRS) return ANY_ROW;
    if (rows.code == KVQ_BF16) return BF16_ROW;
    if (rows.code == KVQ_FP8) return FP8_ROW;
    if (rows.code == KVQ_INT8) return INT8_ROW;
    if (rows.code != KVQ_INT4 || rows.dim / 2 % TILE_PAIRS) return ANY_ROW;
    if (rows.group_size == TILE_ROWS) return INT4_G16_ROW;
    return rows.group_size % TILE_PAIRS ? ANY_ROW : INT4_ROW;
}

// Stored rows of a tile: as keys [elements / 32][TILE][32], and as values [elements / 16][TILE / 2][16][2].
struct TileRows {
    bf16 *keys, *low_keys, *values, *low_values;  // values: of latents only
    float* scales;  // [TILE] that keys and values are still to be multiplied by
    float *rows, *mean;  // two decoded rows; a block's mean
    int blocks;          // of 32 elements
    RowKind kind;
    bool is_exact;   // the low parts are zero
    bool is_scaled;  // `scales` are not all 1
};

inline TileRows take_tile_rows(const KvqRows& rows, int width, bool has_values, Memory& memory) {
    TileRows t;
    t.blocks = width / TILE_PAIRS;
    t.kind = kind_of(rows);
    t.is_scaled = t.kind == FP8_ROW || t.kind == INT8_ROW;
    t.is_exact = t.is_scaled || t.kind == BF16_ROW;
    int64_t size = (int64_t)t.blocks * BLOCK;
    t.keys = memory.take<bf16>(size);
    t.low_keys = memory.take<bf16>(t.is_exact ? 0 : size);
    t.values = has_values ? memory.take<bf16>(size) : nullptr;
    t.low_values = memory.take<bf16>(has_values && !t.is_exact ? size : 0);
    t.scales = memory.take<float>(TILE);
    t.rows = memory.take<float>(2 * width);
    t.mean = memory.take<float>(width);
    return t;
}

// Two keys' numbers, element by element.
inline void store_pair(bf16* values, int pair, int block, reg a, reg b) {
    alignas(64) static const uint16_t ORDER[2][32] = {
        {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    bf16* to = values + (int64_t)block * BLOCK + pair * TILE_PAIRS;
    for (int i = 0; i < 2; i++)
        _mm512_storeu_si512(to + i * (TILE / 2) * TILE_PAIRS,
                            _mm512_permutex2var_epi16(a, _mm512_load_si512(ORDER[i]), b));
}

// 32 elements of two keys.
inline void put_pair(const TileRows& t, int key, int i, Two a, Two b) {
    int64_t at = (int64_t)i * BLOCK + key * TILE_PAIRS;
    _mm512_storeu_si512(t.keys + at, a.high);
    _mm512_storeu_si512(t.keys + at + TILE_PAIRS, b.high);
    if (t.values) store_pair(t.values, key / 2, i, a.high, b.high);
    if (t.is_exact) return;
    _mm512_storeu_si512(t.low_keys + at, a.low);
    _mm512_storeu_si512(t.low_keys + at + TILE_PAIRS, b.low);
    if (t.values) store_pair(t.low_values, key / 2, i, a.low, b.low);
}

// Fill a tile with the keys [skip, keys) of a span, and zeros.
template <class Row>
KVQ_TILE_TARGET inline void fill_pairs(const TileRows& t, Stored& stored, Span span) {
    for (int key = 0; key < TILE; key += 2) {
        bool exists[2];
        int64_t block[2];
        int offset[2];
        for (int i = 0; i < 2; i++) {
            exists[i] = key + i >= span.skip && key + i < span.keys;
            t.scales[key + i] = 1;
            if (!exists[i]) continue;
            block[i] = *span.here.entry, offset[i] = span.here.offset;
            span.here.skip(1);
        }
        int any = exists[0] ? 0 : 1;  // what is not there is read from beside it, or from nowhere
        if (!exists[any]) {
            for (int i = 0; i < t.blocks; i++) put_pair(t, key, i, Two{}, Two{});
            continue;
        }
        int a = exists[0] ? 0 : any, b = exists[1] ? 1 : any;
        Row first(stored, block[a], offset[a], t.rows), second(stored, block[b], offset[b], t.rows + t.blocks * TILE_PAIRS);
        if (exists[0]) t.scales[key] = first.scale();
        if (exists[1]) t.scales[key + 1] = second.scale();
        if (exists[0] && exists[1]) {  // as most do
            for (int i = 0; i < t.blocks; i++) put_pair(t, key, i, first.at(i), second.at(i));
            continue;
        }
        for (int i = 0; i < t.blocks; i++) {
            Two x = first.at(i), y = second.at(i);
            put_pair(t, key, i, exists[0] ? x : Two{}, exists[1] ? y : Two{});
        }
    }
}

inline void fill_tile(const TileRows& t, Stored& stored, Span span) {
    switch (t.kind) {
        case BF16_ROW: return fill_pairs<Bf16Row>(t, stored, span);
        case FP8_ROW: return fill_pairs<Fp8Row>(t, stored, span);
        case INT8_ROW: return fill_pairs<Int8Row>(t, stored, span);
        case INT4_ROW: return fill_pairs<Int4Row<false>>(t, stored, span);
        case INT4_G16_ROW: return fill_pairs<Int4Row<true>>(t, stored, span);
        default: return fill_pairs<AnyRow>(t, stored, span);
    }
}

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

// Tiles 0 to 3 into x [TILE, 16], and zeros into the tiles.
inline void store_products(float* x) {
    KVQ_TILE_STORE(0, x, 64);
    KVQ_TILE_STORE(1, x + 256, 64);
    KVQ_TILE_STORE(2, x + 512, 64);
    KVQ_TILE_STORE(3, x + 768, 64);
    KVQ_TILE_ZERO(0);
    KVQ_TILE_ZERO(1);
    KVQ_TILE_ZERO(2);
    KVQ_TILE_ZERO(3);
}

struct TileScratch {
    float* row;                                   // that is written
    float* queries;                               // 16, latent and rotary parts beside each other
    bf16 *latent_q, *low_latent_q;                // [rows / 16][v blocks][16 pairs][16 rows][2]
    bf16 *rotary_q, *low_rotary_q;                // the same of k blocks
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

    // Scores of 16 rows.
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
        KVQ_TILE_ZERO(0);
        KVQ_TILE_ZERO(1);
        KVQ_TILE_ZERO(2);
        KVQ_TILE_ZERO(3);
    }

    static void ask(const Call&, const Task&, int) {}
    static void run(const Call& call, const Task& task, Scratch& s, int split) {
        int rows = (task.rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        start(s.run, task.rows, call.v_width);
        memset(s.run.out, 0, (size_t)rows * call.v_width * 4);
        memset(s.running.totals, 0, (size_t)task.rows * W * 4);
        Stored latents(call.layer.v, s.latent.mean), rotary(call.layer.k, s.rotary.mean);
        begin_tiles();
        KVQ_TILE_ZERO(0);
        KVQ_TILE_ZERO(1);
        KVQ_TILE_ZERO(2);
        KVQ_TILE_ZERO(3);
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
