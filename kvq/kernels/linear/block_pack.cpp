// Packing of GGUF blocks into panels, which blocks.h describes.

#include <sys/mman.h>
#include <unistd.h>

#include "../native/pool.h"
#include "blocks.h"

namespace {

constexpr int MOST_COLUMNS = 256;  // of a block
constexpr int64_t PIECE = 1 << 20;   // bytes of rows that are packed before their pages are dropped

// One output's block: codes without sign or offset, one a byte, and its scales as they are stored in a panel.
struct Opened {
    uint8_t codes[MOST_COLUMNS];
    uint16_t scale, minimum;
    uint8_t small[MOST_GROUPS], minima[MOST_GROUPS];
};

inline uint16_t half_at(const uint8_t* p) { return load_as<uint16_t>(p); }

// Blocks of 32: the low nibbles are the first 16 columns, the high ones the others.
inline void open_nibbles(uint8_t* codes, const uint8_t* p) {
    for (int i = 0; i < 16; i++) codes[i] = p[i] & 15, codes[i + 16] = p[i] >> 4;
}

inline void add_high_bits(uint8_t* codes, const uint8_t* p) {
    uint32_t bits = load_as<uint32_t>(p);
    for (int i = 0; i < 32; i++) codes[i] |= (bits >> i & 1) << 4;
}

// Scales and minima of 6 bits, eight of each in 12 bytes.
inline void open_sixes(Opened& b, const uint8_t* p) {
    for (int i = 0; i < 4; i++) {
        b.small[i] = p[i] & 63, b.minima[i] = p[i + 4] & 63;
        b.small[i + 4] = (p[i + 8] & 15) | p[i] >> 6 << 4;
        b.minima[i + 4] = p[i + 8] >> 4 | p[i + 4] >> 6 << 4;
    }
}

inline void open_q2(Opened& b, const uint8_t* p) {
    memcpy(b.small, p, 16);
    for (int n = 0; n < 256; n++) b.codes[n] = p[16 + n / 128 * 32 + n % 32] >> n % 128 / 32 * 2 & 3;
    b.scale = half_at(p + 80), b.minimum = half_at(p + 82);
}

inline void open_q3(Opened& b, const uint8_t* p) {
    const uint8_t *high = p, *low = p + 32, *small = p + 96;
    for (int n = 0; n < 256; n++)
        b.codes[n] = (low[n / 128 * 32 + n % 32] >> n % 128 / 32 * 2 & 3) | (high[n % 32] >> n / 32 & 1) << 2;
    for (int i = 0; i < 16; i++) {
        int bits = (small[i % 8] >> i / 8 * 4 & 15) | (small[8 + i % 4] >> i / 4 * 2 & 3) << 4;
        b.small[i] = (uint8_t)(bits - 32);
    }
    b.scale = half_at(p + 108);
}

inline void open_q4(Opened& b, const uint8_t* p) {
    b.scale = half_at(p), b.minimum = half_at(p + 2);
    open_sixes(b, p + 4);
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i++) {
            uint8_t both = p[16 + 32 * j + i];
            b.codes[64 * j + i] = both & 15, b.codes[64 * j + 32 + i] = both >> 4;
        }
}

inline void open_q5(Opened& b, const uint8_t* p) {
    b.scale = half_at(p), b.minimum = half_at(p + 2);
    open_sixes(b, p + 4);
    const uint8_t *high = p + 16, *low = p + 48;
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i++) {
            uint8_t both = low[32 * j + i];
            b.codes[64 * j + i] = (both & 15) | (high[i] >> 2 * j & 1) << 4;
            b.codes[64 * j + 32 + i] = both >> 4 | (high[i] >> (2 * j + 1) & 1) << 4;
        }
}

inline void open_q6(Opened& b, const uint8_t* p) {
    for (int n = 0; n < 2; n++)
        for (int i = 0; i < 32; i++) {
            const uint8_t *low = p + 64 * n + i, high = p[128 + 32 * n + i];
            uint8_t* to = b.codes + 128 * n + i;
            to[0] = (low[0] & 15) | (high & 3) << 4, to[32] = (low[32] & 15) | (high >> 2 & 3) << 4;
            to[64] = low[0] >> 4 | (high >> 4 & 3) << 4, to[96] = low[32] >> 4 | high >> 6 << 4;
        }
    memcpy(b.small, p + 192, 16);
    b.scale = half_at(p + 208);
}

void open_block(Opened& b, int blocks, const uint8_t* p) {
    switch (blocks) {
        case KVQ_Q2_K: return open_q2(b, p);
        case KVQ_Q3_K: return open_q3(b, p);
        case KVQ_Q4_K: return open_q4(b, p);
        case KVQ_Q5_K: return open_q5(b, p);
        case KVQ_Q6_K: return open_q6(b, p);
        case KVQ_MXFP4:
            b.scale = p[0];
            return open_nibbles(b.codes, p + 1);
    }
    b.scale = half_at(p), p += 2;
    if (FORMS[blocks].has_minimum) b.minimum = half_at(p), p += 2;
    if (blocks == KVQ_Q8_0) {
        for (int i = 0; i < 32; i++) b.codes[i] = p[i] ^ 128;
        return;
    }
    bool has_fifth = FORMS[blocks].kind == CODES_5;
    open_nibbles(b.codes, has_fifth ? p + 4 : p);
    if (has_fifth) add_high_bits(b.codes, p);
}

// Two bits of each code from bit `shift` on, four words in a row of bytes. Returns the end.
inline uint8_t* pack_pairs_of_bits(uint8_t* out, const uint8_t* words, int shift) {
    for (int i = 0; i < 2; i++, out += 64, words += 256)
        for (int b = 0; b < 64; b++) {
            uint8_t low = (words[b] >> shift & 3) | (words[b + 64] >> shift & 3) << 2;
            out[b] = low | (words[b + 128] >> shift & 3) << 4 | (words[b + 192] >> shift & 3) << 6;
        }
    return out;
}

// One bit of each code, in the order of the bytes.
inline void pack_bits(uint8_t* out, const uint8_t* words, int shift) {
    for (int b = 0; b < 64; b++, words += 8) {
        uint64_t eight = load_as<uint64_t>(words) >> shift & 0x0101010101010101;
        out[b] = (uint8_t)(eight * 0x0102040810204080 >> 56);
    }
}

// Codes of 32 columns by words: byte 64 w + 4 o + i is output o's column 4 w + i.
inline void pack_codes(uint8_t* out, const uint8_t* words, CodeKind kind) {
    if (kind == CODES_8) {
        memcpy(out, words, CHUNK * OUTPUTS);
        return;
    }
    if (kind == CODES_2 || kind == CODES_3) {
        out = pack_pairs_of_bits(out, words, 0);
    } else {
        for (int i = 0; i < 4; i++, out += 64, words += 128)
            for (int b = 0; b < 64; b++) out[b] = (uint8_t)((words[b] & 15) | words[b + 64] << 4);
        words -= 512;
    }
    if (kind == CODES_6) pack_pairs_of_bits(out, words, 4);
    if (kind == CODES_3 || kind == CODES_5) pack_bits(out, words, kind == CODES_3 ? 2 : 4);
}

inline void pack_scales(uint8_t* out, const Opened* blocks, const BlockForm& form) {
    bool is_exponent = form.scale_bytes() == OUTPUTS;
    for (int o = 0; o < OUTPUTS; o++) {
        uint8_t* to = out;
        if (is_exponent)
            to[o] = (uint8_t)blocks[o].scale, to += OUTPUTS;
        else
            memcpy(to + 2 * o, &blocks[o].scale, 2), to += 2 * OUTPUTS;
        if (form.has_minimum) memcpy(to + 2 * o, &blocks[o].minimum, 2), to += 2 * OUTPUTS;
        if (form.small == NO_SMALL) continue;
        for (int g = 0; g < form.groups(); g++, to += OUTPUTS) to[o] = blocks[o].small[g];
        if (form.small == PAIRS_OF_BYTES)
            for (int g = 0; g < form.groups(); g++, to += OUTPUTS) to[o] = blocks[o].minima[g];
    }
}

// `rows`: one per output, null past the last, whose outputs are zeros.
void pack_block_panel(const uint8_t* const* rows, int64_t columns, int blocks, uint8_t* out) {
    const BlockForm& form = FORMS[blocks];
    static const uint8_t zeros[256] = {};
    Opened opened[OUTPUTS] = {};
    for (int64_t at = 0; at < columns; at += form.columns) {
        for (int o = 0; o < OUTPUTS; o++) open_block(opened[o], blocks, rows[o] ? rows[o] + at / form.columns * form.file_bytes : zeros);
        pack_scales(out, opened, form);
        out += form.scale_bytes();
        for (int first = 0; first < form.columns; first += CHUNK, out += form.chunk_bytes()) {
            uint8_t words[CHUNK * OUTPUTS];
            for (int o = 0; o < OUTPUTS; o++)
                for (int w = 0; w < CHUNK / 4; w++) memcpy(words + 64 * w + 4 * o, opened[o].codes + first + 4 * w, 4);
            pack_codes(out, words, form.kind);
        }
    }
}

// Drop the pages of mapped files that rows [first, last) of the joined parts lie in, so that rows and panels are not
// resident together. A page that ends in other rows is left to them.
void drop_packed(const KvqMatrix* parts, int count, int64_t first, int64_t last) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (int i = 0; i < count; first -= parts[i].rows, last -= parts[i].rows, i++) {
        int64_t from = first < 0 ? 0 : first, to = last < parts[i].rows ? last : parts[i].rows;
        if (!parts[i].mapped || from >= to) continue;
        uintptr_t data = (uintptr_t)parts[i].data, whole = (data + page - 1) / page * page;
        uintptr_t begin = (data + from * parts[i].row) / page * page, end = (data + to * parts[i].row) / page * page;
        if (begin < whole) begin = whole;
        if (begin < end) madvise((void*)begin, end - begin, MADV_DONTNEED);  // advice: a failure costs memory only
    }
}

}  // namespace

// Pack the outputs of `parts`, rows of blocks of one type, one part after the other.
KVQ_KERNEL(pack_blocks)(const KvqMatrix* parts, int count, int64_t columns, int blocks, uint8_t* panels, int threads) {
    int64_t outputs = 0, bytes = columns / FORMS[blocks].columns * FORMS[blocks].bytes();
    for (int i = 0; i < count; i++) outputs += parts[i].rows;
    int64_t all = (outputs + OUTPUTS - 1) / OUTPUTS, share = all / (4 * (int64_t)(threads < 1 ? 1 : threads));
    int64_t piece = PIECE / bytes < share ? PIECE / bytes : share;  // panels
    if (piece < 1) piece = 1;
    run_tasks(threads, (all + piece - 1) / piece, 1, [=](int, int64_t at) {
        int64_t first = at * piece, last = first + piece < all ? first + piece : all;
        for (int64_t panel = first; panel < last; panel++) {
            const uint8_t* rows[OUTPUTS] = {};
            find_rows(rows, parts, count, panel);
            pack_block_panel(rows, columns, blocks, panels + panel * bytes);
        }
        drop_packed(parts, count, first * OUTPUTS, last * OUTPUTS);
    });
    return KVQ_OK;
}
