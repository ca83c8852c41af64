// Scores over K whose scales are per channel: they go to the queries, anew for every block, so codes are multiplied
// as they lie and nothing is left to do for a key but one product and one sum.
//
// Some keys of a block are turned around, so that a register holds the same word of W keys, and made pairs of 16-bit
// numbers: of every word's four bytes the even ones, then the odd ones. A byte is a code, or two channels of a pair,
// of which a mask leaves the one and a product whose high half is taken the other. Queries are laid out alike.
#pragma once

#include "integer_words.h"
#include "memory.h"

#if defined(KVQ_INTEGER)

namespace {

constexpr int CHANNEL_KEYS = WORD_COLUMNS * W;  // keys at a time, of one block
constexpr int MOST_CHANNELS = 256;              // 127 * 32767 * 256 < 2^31: sums can't overflow

// How the rows of K lie as bytes.
struct ChannelCut {
    int bytes, words;                      // of a row, once codes in planes are bytes
    int kinds;                             // registers of 16-bit numbers that a word becomes
    bool is_paired;
    void (*expand)(uint8_t* out, const uint8_t* row, int bytes);  // of codes in planes; else null
};

struct ChannelScratch {
    float *scale, *offset;  // [dim] of the block at work, in the order of queries
    int32_t* splits;        // [words, 4] of pairs: masks of even and odd bytes, then factors
    int32_t* q;             // [rows, words, kinds] of the block at work
    float *factors, *offsets;  // [rows]
    uint8_t* expanded;      // [CHANNEL_KEYS, bytes], up to whole registers each
    reg* turned;            // [words, WORD_COLUMNS]
    reg* operands;          // [words, kinds, WORD_COLUMNS]
};

// Two nibbles of every byte beside each other.
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

// Numbers in the order of queries: of pairs the second ones go backwards.
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

constexpr int other_half(int i) { return i ^ 2; }

// Of each word two 16-bit numbers of even bytes, then two of odd ones: lanes 0 and 1 of every four.
inline reg joined_halves(vi x) {
    vi other = KVQ_PICKED(x, x, other_half);
    return (reg)((x & 0xffff) | (other << 16));
}

// W numbers of first channels and W of second ones into [W / 4 words, 4].
inline void store_pairs(int32_t* out, vi first, vi second) {
    reg x = KVQ_MM(unpacklo_epi64)(joined_halves(first), joined_halves(second));
    memcpy(out, &x, sizeof x);
}

// W numbers into [W / 4 words, 2].
inline void store_singles(int32_t* out, vi x) {
    int32_t halves[W];
    reg y = joined_halves(x);
    memcpy(halves, &y, sizeof y);
    for (int i = 0; i < W / 4; i++) memcpy(out + 2 * i, halves + 4 * i, 8);
}

// Scales of W channels that share a code of `bits` bits, by their bytes and shares.
inline vf shared_scales(vi codes, vi share, int bits) {
    vi at = (codes << 20) + (107 << 23), levels = ((vi{} + 1) << share) - 1;
    return load_as<vf>(&at) * (all((float)((1 << bits) - 1)) / floats(levels));
}

// Get the scales of a block ready.
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
        store_pairs(s.splits + i, ((vi{} + 1) << share) - 1, (vi{} + 1) << (16 - share));
    }
}

// Queries [rows, dim], in their order, for the block at work.
inline void read_block_queries(const ChannelScratch& s, const ChannelCut& c, const float* q, int width, int rows, int dim) {
    int row_words = c.words * c.kinds, half = dim / 2;
    for (int r = 0; r < rows; r++, q += width) {
        vf top{}, offset{};
        for (int i = 0; i < dim; i += W) {
            vf x = load(q + i), y = x * load(s.scale + i);
            top = maximum(top, maximum(y, -y));
            offset += x * load(s.offset + i);
        }
        float most = largest(top);
        if (most < SMALLEST) most = 0;  // its inverse would be infinite
        vf factor = all(most > 0 ? MOST / most : 0.0f);
        int32_t* out = s.q + (int64_t)r * row_words;
        auto number = [&](int i) {
            return __builtin_convertvector(rounded(load(q + i) * load(s.scale + i) * factor), vi);
        };
        if (c.is_paired)
            for (int i = 0; i < half; i += W) store_pairs(out + i, number(i), number(half + i));
        else
            for (int i = 0; i < dim; i += W) store_singles(out + i / 2, number(i));
        s.factors[r] = most / MOST;
        s.offsets[r] = sum(offset);
    }
}

// 16-bit numbers of some keys' words, as products take them.
inline void split_words(const ChannelScratch& s, const ChannelCut& c, bool is_signed) {
    const reg* x = s.turned;
    reg* to = s.operands;
    const reg low = KVQ_MM(set1_epi32)(0x00ff00ff);
    for (int w = 0; w < c.words; w++, x += WORD_COLUMNS, to += c.kinds * WORD_COLUMNS) {
        for (int i = 0; i < WORD_COLUMNS; i++) {
            reg even = is_signed ? even_bytes(x[i]) : x[i] & low;
            reg odd = is_signed ? odd_bytes(x[i]) : KVQ_MM(srli_epi16)(x[i], 8);
            if (c.is_paired) {
                const int32_t* split = s.splits + 4 * w;
                to[i] = even & both(split[0]);
                to[WORD_COLUMNS + i] = odd & both(split[1]);
                to[2 * WORD_COLUMNS + i] = KVQ_MM(mulhi_epu16)(even, both(split[2]));
                to[3 * WORD_COLUMNS + i] = KVQ_MM(mulhi_epu16)(odd, both(split[3]));
            } else {
                to[i] = even, to[WORD_COLUMNS + i] = odd;
            }
        }
    }
}

// Scores of R rows over the keys whose operands are there.
template <int R>
inline void channel_scores(float* scores, const ChannelScratch& s, int first, int count) {
    vi sums[R][WORD_COLUMNS] = {};
    const int32_t* q = s.q + (int64_t)first * count;
    const reg* x = s.operands;
    for (int i = 0; i < count; i++, x += WORD_COLUMNS) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            reg y = both(q[r * count + i]);
#pragma GCC unroll 2
            for (int c = 0; c < WORD_COLUMNS; c++) {
                sums[r][c] = multiply_add(sums[r][c], x[c], y);
                keep(sums[r][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int c = 0; c < WORD_COLUMNS; c++)
            store(scores + r * TILE + c * W, floats(sums[r][c]) * s.factors[first + r] + all(s.offsets[first + r]));
}

// Scores [rows, TILE] over CHANNEL_KEYS keys of the block at work, whose rows begin at `codes`.
inline void block_scores(float* scores, const ChannelScratch& s, const ChannelCut& c, const KvqRows& rows,
                         const uint8_t* codes, int num_rows) {
    typedef void (*Kernel)(float*, const ChannelScratch&, int, int);
    constexpr Kernel KERNELS[] = {channel_scores<1>, channel_scores<2>, channel_scores<3>, channel_scores<4>};
    const int stride = (c.bytes + BYTES - 1) / BYTES * BYTES;
    const uint8_t* keys[CHANNEL_KEYS];
    for (int i = 0; i < CHANNEL_KEYS; i++) {
        keys[i] = codes + i * rows.codes_slot;
        if (!c.expand) continue;
        c.expand(s.expanded + i * stride, keys[i], c.bytes);
        keys[i] = s.expanded + i * stride;
    }
    for (int i = 0; i < WORD_COLUMNS; i++) turn_words(s.turned + i, keys + i * W, c.bytes);
    split_words(s, c, rows.code == KVQ_INT8);
    for (int r = 0, some; r < num_rows; r += some) {
        some = some_of(num_rows - r, MOST_ROWS);
        KERNELS[some - 1](scores + r * TILE, s, r, c.words * c.kinds);
    }
}

// Scores [rows, TILE] of a tile's keys [skip, keys); `here` is at the first of them. Blocks are read as wholes.
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
