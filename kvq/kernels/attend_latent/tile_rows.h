// Stored rows in the layout of bf16 tiles (Intel's AMX). With scales per group, numbers that bf16 can't represent are
// sums of two bf16 numbers; codes of FP8 and INT8 are exact and have separate scales.
#pragma once

#include "../native/amx.h"
#include "stored.h"

#if defined(KVQ_TILES)

namespace {

constexpr int BLOCK = TILE * TILE_PAIRS + 32;     // TILE keys of 32 elements; padded, or all lie in the same sets

inline int tile_width(int dim) { return (dim + TILE_PAIRS - 1) / TILE_PAIRS * TILE_PAIRS; }

// FP32 has more digits than two bf16 numbers can represent.
inline bool takes_tiles(const KvqLayer& layer) { return layer.k.code != KVQ_FP32 && layer.v.code != KVQ_FP32; }

// x as a sum of two bf16 numbers, 32 at a time.
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

// A stored row, 32 elements at a time. Each kind of code has such a reader; all except the last take rows of a
// multiple of 32 elements, without means.
struct Bf16Row {
    const uint8_t* codes;
    Bf16Row(Stored& stored, int64_t block, int offset, float*) : codes(row_codes(stored.rows, block, 0, offset)) {}
    float scale() const { return 1; }
    Two at(int i) const { return {_mm512_loadu_si512(codes + i * 64), reg{}}; }
};

inline float scale_of(const KvqRows& rows, int64_t block, int offset) {
    return rows.scales ? from_fp16(*(const uint16_t*)row_scales(rows, block, 0, offset)) : rows.static_scales[0];
}

struct ScaledRow {
    const uint8_t* codes;
    float factor;
    ScaledRow(Stored& stored, int64_t block, int offset, float*)
        : codes(row_codes(stored.rows, block, 0, offset)), factor(scale_of(stored.rows, block, offset)) {}
    float scale() const { return factor; }
};

struct Int8Row : ScaledRow {
    using ScaledRow::ScaledRow;
    KVQ_TILE_TARGET Two at(int i) const {
        const __m128i* p = (const __m128i*)(codes + i * 32);
        __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
        __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p + 1)));
        return {(reg)_mm512_cvtne2ps_pbh(b, a), reg{}};
    }
};

struct Fp8Row : ScaledRow {
    using ScaledRow::ScaledRow;
    Two at(int i) const {  // bf16 has E4M3FN's exponent and mantissa unchanged; see fp8_values
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

// Scales and minimums of a row's groups, one after the other, as numbers; the same as from pair_of.
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

// The values of a group's 16 codes are looked up in a table. SMALL: groups of 16 elements, two per block; else of a
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
    float* scales;  // [TILE] factors of keys and values that are not applied yet
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
        int any = exists[0] ? 0 : 1;  // a missing row is read from its neighbour, or not at all
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

}  // namespace

#endif
