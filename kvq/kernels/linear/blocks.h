// Weights in blocks of GGUF files: sixteen outputs' blocks of the same columns side by side, a panel's block.
//
// A panel's block contains what its blocks contain: scales first, then 32 columns at a time the low bits of their
// codes, then the high ones. It has as many bytes as in the file, but for small scales of 6 bits, which become bytes.
#pragma once

#include "lanes.h"

namespace {

// D385: panels, not rows of the mapped file
constexpr int CHUNK = 32;  // columns whose codes lie together

enum CodeKind { CODES_2, CODES_3, CODES_4, CODES_5, CODES_6, CODES_8, CODES_LISTED };

// How a block's small scales are stored: none, bytes of scales, of scales and minima, or both in one byte.
enum SmallScales { NO_SMALL, SIGNED_SMALL, PAIRS_OF_BYTES, PAIRS_IN_BYTE };

struct BlockForm {
    CodeKind kind;
    int columns;  // of a block
    int group;    // columns that share a scale
    int offset;   // of codes without sign
    bool has_minimum;
    SmallScales small;
    int file_bytes;

    constexpr int groups() const { return columns / group; }
    constexpr int scale_bytes() const {  // of a panel's block: one scale, and one minimum, of each output
        if (file_bytes == 17) return OUTPUTS;  // an exponent
        int small_bytes = small == NO_SMALL ? 0 : small == PAIRS_OF_BYTES ? 2 * groups() : groups();
        return OUTPUTS * ((has_minimum ? 4 : 2) + small_bytes);
    }
    constexpr int chunk_bytes() const {  // of codes
        int bits = kind == CODES_2 ? 2 : kind == CODES_3 ? 3 : kind == CODES_5 ? 5 : kind == CODES_6 ? 6 : kind == CODES_8 ? 8 : 4;
        return CHUNK * OUTPUTS * bits / 8;
    }
    constexpr int bytes() const { return scale_bytes() + columns / CHUNK * chunk_bytes(); }
};

constexpr BlockForm FORMS[] = {  // by KvqBlocks
    {CODES_4, 32, 32, 8, false, NO_SMALL, 18},              // Q4_0
    {CODES_4, 32, 32, 0, true, NO_SMALL, 20},               // Q4_1
    {CODES_5, 32, 32, 16, false, NO_SMALL, 22},             // Q5_0
    {CODES_5, 32, 32, 0, true, NO_SMALL, 24},               // Q5_1
    {CODES_8, 32, 32, 0, false, NO_SMALL, 34},              // Q8_0
    {CODES_2, 256, 16, 0, true, PAIRS_IN_BYTE, 84},         // Q2_K
    {CODES_3, 256, 16, 4, false, SIGNED_SMALL, 110},        // Q3_K
    {CODES_4, 256, 32, 0, true, PAIRS_OF_BYTES, 144},       // Q4_K
    {CODES_5, 256, 32, 0, true, PAIRS_OF_BYTES, 176},       // Q5_K
    {CODES_6, 256, 16, 32, false, SIGNED_SMALL, 210},       // Q6_K
    {CODES_LISTED, 32, 32, 0, false, NO_SMALL, 18},         // IQ4_NL
    {CODES_LISTED, 32, 32, 0, false, NO_SMALL, 17},         // MXFP4
};
constexpr int MOST_GROUPS = 16;  // of a block

constexpr bool is_signed(CodeKind kind) { return kind == CODES_8 || kind == CODES_LISTED; }

// What a code is larger than its value by, as `dot` sees it.
inline int offset_of(const BlockForm& form) { return is_signed(form.kind) ? offset<false> : form.offset; }

// Values of listed codes plus 128.
constexpr uint8_t NEAR_NORMAL[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t E2M1_DOUBLED[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
inline const uint8_t* listed(int blocks) { return blocks == KVQ_MXFP4 ? E2M1_DOUBLED : NEAR_NORMAL; }

inline int64_t block_panel_bytes(const KvqLinear& l) {
    return (int64_t)l.k / FORMS[l.blocks].columns * FORMS[l.blocks].bytes();
}

// One block's scales and minima: of every group, for sixteen outputs.
struct BlockScales {
    Floats scale[MOST_GROUPS], minimum[MOST_GROUPS];  // a value is scale * (code - offset) + minimum
};

inline Floats bytes_as_floats(const uint8_t* p, int mask, int shift, int subtracted) {
    Floats x;
    for (int i = 0; i < PARTS; i++)
        x.part[i] = floats((((load_bytes(p + i * W) >> shift) & mask) ^ subtracted) - subtracted);
    return x;
}

inline Floats times(const Floats& a, const Floats& b) {
    Floats x;
    for (int i = 0; i < PARTS; i++) x.part[i] = a.part[i] * b.part[i];
    return x;
}

inline Floats minus(const Floats& a) {
    Floats x;
    for (int i = 0; i < PARTS; i++) x.part[i] = -a.part[i];
    return x;
}

// Powers of two by their exponents plus 128; the least two are below the normal floats.
inline Floats powers(const uint8_t* p) {
    Floats x;
    for (int i = 0; i < PARTS; i++) {
        vi e = load_bytes(p + i * W), bits = (e - 1) << 23;
        bits = e < 2 ? (vi{} + 0x200000) << e : bits;
        memcpy(&x.part[i], &bits, sizeof bits);
    }
    return x;
}

inline void read_scales(BlockScales& s, int blocks, const uint8_t* p) {
    const BlockForm& form = FORMS[blocks];
    if (blocks == KVQ_MXFP4) {
        s.scale[0] = powers(p);
        return;
    }
    Floats d = load_floats(p, KVQ_FP16), m = {};
    p += 2 * OUTPUTS;
    if (form.has_minimum) m = load_floats(p, KVQ_FP16), p += 2 * OUTPUTS;
    if (form.small == NO_SMALL) {
        s.scale[0] = d, s.minimum[0] = m;
        return;
    }
    int groups = form.groups();
    if (form.small != SIGNED_SMALL) m = minus(m);
    for (int g = 0; g < groups; g++) {
        const uint8_t* own = p + g * OUTPUTS;
        if (form.small == SIGNED_SMALL) {
            s.scale[g] = times(d, bytes_as_floats(own, 255, 0, 128));
        } else if (form.small == PAIRS_OF_BYTES) {
            s.scale[g] = times(d, bytes_as_floats(own, 255, 0, 0));
            s.minimum[g] = times(m, bytes_as_floats(own + groups * OUTPUTS, 255, 0, 0));
        } else {
            s.scale[g] = times(d, bytes_as_floats(own, 15, 0, 0));
            s.minimum[g] = times(m, bytes_as_floats(own, 15, 4, 0));
        }
    }
}

}  // namespace

// Multiply a tile of rows by the panels [panel, last). `tile`: a Tile; `out`: an Output.
KVQ_KERNEL(block_panels)(const KvqLinear* linear, const void* tile, int64_t panel, int64_t last, const void* out,
                         int64_t row);
