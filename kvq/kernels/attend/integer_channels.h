// Scores over K with per-channel scales: scales are folded into the queries for each block, so codes are multiplied
// directly, and a key needs only one product and one sum.
//
// Some keys of a block are transposed, so that a register contains the same word of W keys, and converted to pairs of
// 16-bit numbers: of every word's four bytes the even ones, then the odd ones. A byte is a code, or two channels of a
// pair: a mask extracts one channel, and the high half of a product the other. Queries have the same order.
#pragma once

#include "integer_words.h"
#include "../native/memory.h"

#if defined(KVQ_INTEGER)

namespace {

constexpr int CHANNEL_KEYS = WORD_COLUMNS * W;  // keys at a time, of one block
constexpr int MOST_CHANNELS = 256;              // 127 * 32767 * 256 < 2^31: sums can't overflow

// Layout of the rows of K as bytes.
struct ChannelCut {
    int bytes, words;                      // of a row, after codes in planes are converted to bytes
    int kinds;                             // registers of 16-bit numbers that a word becomes
    bool is_paired;
    void (*expand)(uint8_t* out, const uint8_t* row, int bytes);  // of codes in planes; else null
};

struct ChannelScratch {
    float *scale, *offset;  // [dim] of the current block, in the order of queries
    int32_t* splits;        // [words, 4] of pairs: masks of even and odd bytes, then factors
    int32_t* q;             // [rows, words, kinds] of the current block
    float *factors, *offsets;  // [rows]
    uint8_t* expanded;      // [CHANNEL_KEYS, bytes], padded to whole registers each
    reg* turned;            // [words, WORD_COLUMNS]
    reg* operands;          // [words, kinds, WORD_COLUMNS]
};

// Put the two nibbles of every byte into adjacent bytes.
inline void expand_nibbles(uint8_t* out, const uint8_t* row, int bytes) {
    for (int i = 0; i < bytes / 2; i++) out[i] = row[i] & 15, out[bytes / 2 + i] = row[i] >> 4;
}

inline bool takes_channels(const KvqRows& rows, int block_size) {
    int bytes = is_paired(rows) ? rows.dim / 2 : rows.dim;
    bool known = rows.code == KVQ_INT8 || rows.bits <= 6;
    return rows.channels && known && rows.dim <= MOST_CHANNELS && bytes % 16 == 0 && block_size % CHANNEL_KEYS == 0;
}

inline ChannelCut channel_cut(const KvqRows& rows) {
    ChannelCut c = {};
    c.is_paired = is_paired(rows);
    c.bytes = c.is_paired ? rows.dim / 2 : rows.dim;
    c.words = c.bytes / 4;
    c.kinds = c.is_paired ? 4 : 2;
    int bits = c.is_paired ? 2 * rows.bits : rows.bits;
    if (bits == 4) c.expand = expand_nibbles;
    if (bits == 5) c.expand = expand_any<5>;
    if (bits == 6) c.expand = expand_any<6>;
    return c;
}

inline ChannelScratch take_channels(const ChannelCut& c, int rows, Memory& memory) {
    ChannelScratch s;
    s.scale = memory.take<float>(c.is_paired ? 2 * c.bytes : c.bytes);
    s.offset = memory.take<float>(c.is_paired ? 2 * c.bytes : c.bytes);
    s.splits = memory.take<int32_t>(c.is_paired ? 4 * c.words : 0);
    s.q = memory.take<int32_t>((int64_t)(c.words ? rows : 0) * c.words * c.kinds);
    s.factors = memory.take<float>(c.words ? rows : 0);
    s.offsets = memory.take<float>(c.words ? rows : 0);
    s.expanded = memory.take<uint8_t>(c.expand ? CHANNEL_KEYS * ((c.bytes + BYTES - 1) / BYTES * BYTES) : 0);
    s.turned = memory.take<reg>(c.words * WORD_COLUMNS);
    s.operands = memory.take<reg>(c.words * c.kinds * WORD_COLUMNS);
    return s;
}

constexpr int backwards(int i) { return W - 1 - i; }

template <class V>
inline V reversed(V x) {
    return KVQ_PICKED(x, x, backwards);
}

// Numbers in the order of queries: with pairs, the second ones are backwards.
inline void order_channels(float* x, int dim) {
    for (int i = dim / 2, j = dim - W; i < j; i += W, j -= W) {
        vf a = reversed(load(x + i)), b = reversed(load(x + j));
        store(x + i, b), store(x + j, a);
    }
    if (dim / 2 % (2 * W)) {  // an odd number of registers
        int middle = dim / 2 + dim / 4 - W / 2;
        store(x + middle, reversed(load(x + middle)));
    }
}

// 16-bit numbers in the order of products: the even ones of every four, then the odd ones.
inline reg by_bytes(reg x) {
    const int64_t even_first = 0x0706030205040100, second = 0x0f0e0b0a0d0c0908;
#if defined(__AVX512F__)
    return _mm512_shuffle_epi8(x, _mm512_set4_epi64(second, even_first, second, even_first));
#else
    return _mm256_shuffle_epi8(x, _mm256_set_epi64x(second, even_first, second, even_first));
#endif
}

// W numbers of first channels and W of second ones into [W / 4 words, 4].
inline void store_pairs(int32_t* out, vi first, vi second) {
    reg x = by_bytes(KVQ_MM(packs_epi32)((reg)first, (reg)second));
    memcpy(out, &x, sizeof x);
}

inline void store_splits(int32_t* out, vi masks, vi factors) {
    reg x = by_bytes(KVQ_MM(packus_epi32)((reg)masks, (reg)factors));  // 2^15 is not a signed 16-bit number
    memcpy(out, &x, sizeof x);
}

// W numbers into [W / 4 words, 2].
inline void store_singles(int32_t* out, vi x) {
    int32_t halves[W];
    reg y = by_bytes(KVQ_MM(packs_epi32)((reg)x, (reg)x));
    memcpy(halves, &y, sizeof y);
    for (int i = 0; i < W / 4; i++) memcpy(out + 2 * i, halves + 4 * i, 8);
}

// Scales of W channels that share a code of `bits` bits, by their bytes and shares.
inline vf shared_scales(vi codes, vi share, int bits) {
    vi at = (codes << 20) + (107 << 23), levels = ((vi{} + 1) << share) - 1;
    return load_as<vf>(&at) * (all((float)((1 << bits) - 1)) / floats(levels));
}

// Prepare the scales of a block.
inline void read_block_channels(const ChannelScratch& s, const ChannelCut& c, const KvqRows& rows, const uint8_t* scales) {
    int dim = rows.dim;
    if (rows.code == KVQ_INT8) {
        for (int i = 0; i < dim; i += W) {
            vi at = (load_bytes(scales + i) << 20) + (107 << 23);
            vf scale = load_as<vf>(&at), steps = floats((load_bytes(scales + dim + i) ^ 128) - 128);
            store(s.scale + i, scale), store(s.offset + i, steps * scale * (float)CENTER_STEP);
        }
        return;
    }
    for (int i = 0; i < dim; i += W) {
        uint16_t minimums[W];
        memcpy(minimums, scales + dim + 2 * i, sizeof minimums);
        read_fp16(s.offset + i, minimums, W);
    }
    if (!c.is_paired) {
        for (int i = 0; i < dim; i += W) {
            vi at = (load_bytes(scales + i) << 20) + (107 << 23);
            store(s.scale + i, load_as<vf>(&at));
        }
        return;
    }
    order_channels(s.offset, dim);
    const int most = rows.bits - 1 < MOST_SHIFTED ? rows.bits - 1 : MOST_SHIFTED;
    for (int i = 0; i < dim / 2; i += W) {
        vi own = load_bytes(scales + i), other = reversed(load_bytes(scales + dim - W - i));
        vi more = own - other, shifted = ((more < 0 ? -more : more) + 8) >> 4;
        shifted = shifted > most ? (vi{} + most) : shifted;
        vi share = (more < 0 ? -shifted : shifted) + rows.bits;
        store(s.scale + i, shared_scales(own, share, rows.bits));
        store(s.scale + dim / 2 + i, shared_scales(other, 2 * rows.bits - share, rows.bits));
        store_splits(s.splits + i, ((vi{} + 1) << share) - 1, (vi{} + 1) << (16 - share));
    }
}

inline vf magnitude(vf x) {
    vi bits = load_as<vi>(&x) & 0x7fffffff;
    return load_as<vf>(&bits);
}

#if defined(__AVX512F__)
inline vi nearest(vf x) { return (vi)_mm512_cvtps_epi32((__m512)x); }
#else
inline vi nearest(vf x) { return (vi)_mm256_cvtps_epi32((__m256)x); }
#endif

// Prepare queries [rows, dim], in their order, for the current block.
inline void read_block_queries(const ChannelScratch& s, const ChannelCut& c, const float* q, int width, int rows, int dim) {
    int row_words = c.words * c.kinds, half = dim / 2;
    for (int r = 0; r < rows; r++, q += width) {
        vf top{}, offset{};
        for (int i = 0; i < dim; i += W) {
            vf x = load(q + i), y = x * load(s.scale + i);
            top = maximum(top, magnitude(y));
            offset += x * load(s.offset + i);
        }
        float most = largest(top);
        if (most < SMALLEST) most = 0;  // its inverse would be infinite
        vf factor = all(most > 0 ? MOST / most : 0.0f);
        int32_t* out = s.q + (int64_t)r * row_words;
        auto number = [&](int i) { return nearest(load(q + i) * load(s.scale + i) * factor); };
        if (c.is_paired)
            for (int i = 0; i < half; i += W) store_pairs(out + i, number(i), number(half + i));
        else
            for (int i = 0; i < dim; i += W) store_singles(out + i / 2, number(i));
        s.factors[r] = most / MOST;
        s.offsets[r] = sum(offset);
    }
}

// Query rows whose sums a kernel keeps in registers.
constexpr int CHANNEL_ROWS = W > 8 ? 8 : 4;

// One kind of 16-bit numbers of a word of W keys: of even or odd bytes; of pairs the first channels, then the second.
template <bool PAIRED, bool SIGNED>
inline reg operand(reg x, const int32_t* split, int kind) {
    if (SIGNED) return kind ? odd_bytes(x) : even_bytes(x);
    reg y = kind % 2 ? KVQ_MM(srli_epi16)(x, 8) : x & KVQ_MM(set1_epi32)(0x00ff00ff);
    if (!PAIRED) return y;
    return kind < 2 ? y & both(split[kind]) : KVQ_MM(mulhi_epu16)(y, both(split[kind]));
}

template <int R>
inline void store_scores(float* scores, const vi sums[R][WORD_COLUMNS], const ChannelScratch& s, int first) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int c = 0; c < WORD_COLUMNS; c++)
            store(scores + r * TILE + c * W, floats(sums[r][c]) * s.factors[first + r] + all(s.offsets[first + r]));
}

// Scores of R rows over the loaded keys: from their words if these are all rows, else from operands.
template <int R, bool PAIRED, bool SIGNED, bool STAGED>
inline void channel_scores(float* scores, const ChannelScratch& s, const ChannelCut& cut, int first) {
    constexpr int KINDS = PAIRED ? 4 : 2;
    vi sums[R][WORD_COLUMNS] = {};
    const int row = cut.words * KINDS;
    const int32_t* q = s.q + (int64_t)first * row;
    for (int w = 0; w < cut.words; w++)
#pragma GCC unroll 4
        for (int kind = 0; kind < KINDS; kind++) {
            reg x[WORD_COLUMNS];
#pragma GCC unroll 2
            for (int c = 0; c < WORD_COLUMNS; c++)
                x[c] = STAGED ? s.operands[(w * KINDS + kind) * WORD_COLUMNS + c]
                              : operand<PAIRED, SIGNED>(s.turned[w * WORD_COLUMNS + c], s.splits + 4 * w, kind);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                reg y = both(q[r * row + w * KINDS + kind]);
#pragma GCC unroll 2
                for (int c = 0; c < WORD_COLUMNS; c++) {
                    sums[r][c] = multiply_add(sums[r][c], x[c], y);
                    keep(sums[r][c]);
                }
            }
        }
    store_scores<R>(scores, sums, s, first);
}

typedef void (*ChannelKernel)(float*, const ChannelScratch&, const ChannelCut&, int);

template <bool PAIRED, bool SIGNED, bool STAGED, int R = CHANNEL_ROWS>
inline ChannelKernel channel_kernel(int rows) {
    if constexpr (R > 1)
        if (rows < R) return channel_kernel<PAIRED, SIGNED, STAGED, R - 1>(rows);
    return channel_scores<R, PAIRED, SIGNED, STAGED>;
}

// Scores [rows, TILE] over the loaded keys.
template <bool PAIRED, bool SIGNED>
inline void all_channel_scores(float* scores, const ChannelScratch& s, const ChannelCut& cut, int rows) {
    constexpr int KINDS = PAIRED ? 4 : 2;
    if (rows <= CHANNEL_ROWS) return channel_kernel<PAIRED, SIGNED, false>(rows)(scores, s, cut, 0);
    for (int w = 0; w < cut.words; w++)
        for (int kind = 0; kind < KINDS; kind++)
            for (int c = 0; c < WORD_COLUMNS; c++)
                s.operands[(w * KINDS + kind) * WORD_COLUMNS + c] =
                    operand<PAIRED, SIGNED>(s.turned[w * WORD_COLUMNS + c], s.splits + 4 * w, kind);
    for (int r = 0, some; r < rows; r += some) {
        some = some_of(rows - r, CHANNEL_ROWS);
        channel_kernel<PAIRED, SIGNED, true>(some)(scores + r * TILE, s, cut, r);
    }
}

// Scores [rows, TILE] over CHANNEL_KEYS keys of the current block, whose rows begin at `codes`.
inline void block_scores(float* scores, const ChannelScratch& s, const ChannelCut& c, const KvqRows& rows,
                         const uint8_t* codes, int num_rows) {
    const int stride = (c.bytes + BYTES - 1) / BYTES * BYTES;
    const uint8_t* keys[CHANNEL_KEYS];
    for (int i = 0; i < CHANNEL_KEYS; i++) {
        keys[i] = codes + i * rows.codes_slot;
        if (!c.expand) continue;
        c.expand(s.expanded + i * stride, keys[i], c.bytes);
        keys[i] = s.expanded + i * stride;
    }
    for (int i = 0; i < WORD_COLUMNS; i++) turn_words(s.turned + i, keys + i * W, c.bytes);
    auto score = c.is_paired ? all_channel_scores<true, false>
                 : rows.code == KVQ_INT8 ? all_channel_scores<false, true> : all_channel_scores<false, false>;
    score(scores, s, c, num_rows);
}

// Scores [rows, TILE] of a tile's keys [skip, keys); `here` is at the first of them. Whole blocks are read.
inline void channel_tile(float* scores, const ChannelScratch& s, const ChannelCut& c, const KvqRows& rows, int head,
                         const float* q, int width, int num_rows, Cursor here, int skip, int keys) {
    int begin = skip / CHANNEL_KEYS * CHANNEL_KEYS;
    here.offset -= skip - begin;
    for (int key = begin; key < keys; key += CHANNEL_KEYS, here.skip(CHANNEL_KEYS)) {
        if (key == begin || here.offset == 0) {
            read_block_channels(s, c, rows, row_scales(rows, *here.entry, head, 0));
            read_block_queries(s, c, q, width, num_rows, rows.dim);
        }
        block_scores(scores + key, s, c, rows, row_codes(rows, *here.entry, head, here.offset), num_rows);
    }
}

KVQ_PREFETCHES void prefetch_channels(const KvqRows& rows, Cursor there, int head, int keys) {
    for (int i = 0; i < keys;) {
        int count = there.run(keys - i);
        const uint8_t *codes = row_codes(rows, *there.entry, head, there.offset), *scales = row_scales(rows, *there.entry, head, 0);
        for (int64_t at = 0; at < count * rows.codes_slot; at += 64) __builtin_prefetch(codes + at);
        for (int at = 0; at < 3 * rows.dim; at += 64) __builtin_prefetch(scales + at);
        i += count;
        there.skip(count);
    }
}

}  // namespace

#else

namespace {

struct ChannelCut {
    bool is_paired;
};
struct ChannelScratch {};

inline bool takes_channels(const KvqRows&, int) { return false; }
inline ChannelCut channel_cut(const KvqRows&) { return {}; }
inline ChannelScratch take_channels(const ChannelCut&, int, Memory&) { return {}; }
inline void order_channels(float*, int) {}
inline void channel_tile(float*, const ChannelScratch&, const ChannelCut&, const KvqRows&, int, const float*, int, int,
                         Cursor, int, int) {}
KVQ_PREFETCHES void prefetch_channels(const KvqRows&, Cursor, int, int) {}

}  // namespace

#endif
