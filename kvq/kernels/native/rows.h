// Reading rows: dense rows of any float dtype, and quantized rows from blocks.
#pragma once

#include "abi.h"
#include "vectors.h"

namespace {

constexpr int MOST_DIM = 4096;  // elements of a row
constexpr float SMALLEST_SCALE = 5.9604644775390625e-8f;  // 2^-24, of fp16
constexpr int PAD = 16;  // rows in scratch memory are padded with zeros to a multiple of this

constexpr int bytes_of(int code) { return code == KVQ_FP32 ? 4 : code == KVQ_BF16 || code == KVQ_FP16 ? 2 : 1; }

inline int padded(int dim) { return (dim + PAD - 1) / PAD * PAD; }

inline void read_bf16(float* out, const uint16_t* in, int n) {
    for (int i = 0; i < n; i++) out[i] = from_bf16(in[i]);
}

inline void read_fp16(float* out, const uint16_t* in, int n) {
    int i = 0;
#if defined(__F16C__)
    for (; i + W <= n; i += W) store(out + i, (vf)KVQ_MM(cvtph_ps)(load_as<half_reg>(in + i)));
#endif
    for (; i < n; i++) out[i] = from_fp16(in[i]);
}

inline void read_floats(float* out, const uint8_t* in, int n, int code) {
    if (code == KVQ_FP32)
        memcpy(out, in, (size_t)n * 4);
    else if (code == KVQ_BF16)
        read_bf16(out, (const uint16_t*)in, n);
    else
        read_fp16(out, (const uint16_t*)in, n);
}

// Then write zeros up to a whole register.
inline void read_padded(float* out, const uint8_t* in, int n, int code) {
    read_floats(out, in, n, code);
    for (int i = n; i % W; i++) out[i] = 0;
}

inline void write_floats(uint8_t* out, const float* in, int n, int code) {
    if (code == KVQ_FP32)
        memcpy(out, in, (size_t)n * 4);
    else if (code == KVQ_BF16)
        for (int i = 0; i < n; i++) ((uint16_t*)out)[i] = to_bf16(in[i]);
    else
        for (int i = 0; i < n; i++) ((uint16_t*)out)[i] = to_fp16(in[i]);
}

// Elements to read and results to write, in place if they are whole registers of fp32, else in `room`, from which
// `settle` writes results.
inline bool lie_ready(int n, int code) { return code == KVQ_FP32 && n % W == 0; }

inline const float* floats_at(float* room, const uint8_t* in, int n, int code) {
    if (lie_ready(n, code)) return (const float*)in;
    read_padded(room, in, n, code);
    return room;
}

inline float* results_at(float* room, uint8_t* out, int n, int code) { return lie_ready(n, code) ? (float*)out : room; }

inline void settle(uint8_t* out, const float* results, int n, int code) {
    if (!lie_ready(n, code)) write_floats(out, results, n, code);
}

// Load W bytes as integers.
inline vi load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    return vi{p[0], p[1], p[2], p[3]};
#endif
}

inline vf floats(vi x) { return __builtin_convertvector(x, vf); }

// E4M3FN: exponent 0 counts steps of 2^-9; 0x7f and 0xff are NaN.
inline vf fp8_values(vi codes) {
    vi magnitude = codes & 0x7f;
    vi normal = (magnitude << 20) + (120 << 23), small;
    vf steps = floats(magnitude) * 0.001953125f;
    memcpy(&small, &steps, sizeof small);
    vi bits = magnitude < 8 ? small : normal;
    bits = magnitude == 0x7f ? (vi{} + 0x7fc00000) : bits;
    bits |= (codes & 0x80) << 24;
    vf x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Apply `convert`, from W bytes to W floats, to `n` bytes; nothing beyond them is read or written.
template <class Convert>
inline void convert_bytes(float* out, const uint8_t* codes, int n, Convert convert) {
    int i = 0;
    for (; i + W <= n; i += W) store(out + i, convert(load_bytes(codes + i)));
    if (i == n) return;
    uint8_t last[W] = {};
    memcpy(last, codes + i, n - i);
    vf x = convert(load_bytes(last));
    memcpy(out + i, &x, (size_t)(n - i) * 4);
}

constexpr uint8_t LEAST_NARROW = 8, MOST_NARROW = 247;  // limits of narrow scale codes

// A narrow scale; its exponent begins at 107.
inline float narrow_scale(uint8_t code) { return float_of_bits(((uint32_t)code << 20) + (107u << 23)); }

// The step of a narrow minimum, as a part of its scale.
inline float narrow_step(int bits) { return float_of_bits((uint32_t)(127 + bits - 7) << 23); }

// For one group.
struct Pair {
    float scale, minimum;
};

// The scale and the minimum of a row's group; `scales` are the row's.
inline Pair pair_of(const KvqRows& rows, const uint8_t* scales, int group) {
    if (rows.narrow) {
        float scale = narrow_scale(scales[2 * group]);
        return {scale, (float)(int8_t)scales[2 * group + 1] * narrow_step(rows.bits) * scale};
    }
    const uint16_t* pair = (const uint16_t*)scales + 2 * group;
    return {from_fp16(pair[0]), from_fp16(pair[1])};
}

// One load per packed byte: element i in the low half of byte i, element i + dim / 2 in the high one.
inline void read_int4(float* out, const uint8_t* codes, const uint8_t* scales, const KvqRows& rows) {
    int half = rows.dim / 2, run = rows.group_size < half ? rows.group_size : half;
    int low = 0, high = half / rows.group_size;  // groups
    for (int at = 0; at < half; at += run) {
        Pair a = pair_of(rows, scales, low++), b = pair_of(rows, scales, high++);
        convert_bytes(out + at, codes + at, run, [=](vi c) { return floats(c & 15) * a.scale + a.minimum; });
        convert_bytes(out + half + at, codes + at, run, [=](vi c) { return floats(c >> 4) * b.scale + b.minimum; });
    }
}

// Add the bits of one plane to codes `q`; return the address after the plane.
template <int WIDTH>
inline const uint8_t* read_plane(uint8_t* q, const uint8_t* codes, int dim, int shift) {
    int run = dim * WIDTH / 8;
    for (int part = 0; part < 8 / WIDTH; part++)
        for (int i = 0; i < run; i++)
            q[part * run + i] |= (uint8_t)(((codes[i] >> WIDTH * part) & ((1 << WIDTH) - 1)) << shift);
    return codes + run;
}

// Decode codes of one plane directly from its bytes; groups may end inside one of the row's parts.
inline void read_one_plane(float* out, const uint8_t* codes, const uint8_t* scales, const KvqRows& rows) {
    int dim = rows.dim, group = rows.group_size, bits = rows.bits, length = dim * bits / 8, mask = (1 << bits) - 1;
    for (int at = 0; at < dim;) {
        int part = at / length, byte = at - part * length, shift = bits * part;
        int to_group = group - at % group, run = length - byte < to_group ? length - byte : to_group;
        Pair x = pair_of(rows, scales, at / group);
        convert_bytes(out + at, codes + byte, run,
                      [=](vi c) { return floats((c >> shift) & mask) * x.scale + x.minimum; });
        at += run;
    }
}

// Codes of `bits` bits, in planes.
inline void unpack_codes(uint8_t* q, const uint8_t* codes, int dim, int bits) {
    memset(q, 0, (size_t)dim);
    if (bits & 8) codes = read_plane<8>(q, codes, dim, 0);
    if (bits & 4) codes = read_plane<4>(q, codes, dim, bits & 8);
    if (bits & 2) codes = read_plane<2>(q, codes, dim, bits & 12);
    if (bits & 1) read_plane<1>(q, codes, dim, bits & 14);
}

// Codes of any width, in planes; see codec/packing.py.
inline void read_grouped(float* out, const uint8_t* codes, const uint8_t* scales, const KvqRows& rows) {
    int dim = rows.dim, group = rows.group_size, bits = rows.bits;
    if ((bits & (bits - 1)) == 0) return read_one_plane(out, codes, scales, rows);
    uint8_t q[MOST_DIM];
    unpack_codes(q, codes, dim, bits);
    for (int at = 0; at < dim; at += group) {
        Pair x = pair_of(rows, scales, at / group);
        convert_bytes(out + at, q + at, group, [=](vi c) { return floats(c) * x.scale + x.minimum; });
    }
}

inline uint8_t* row_codes(const KvqRows& rows, int64_t block, int head, int64_t offset) {
    return rows.codes + block * rows.codes_block + head * rows.codes_head + offset * rows.codes_slot;
}

inline uint8_t* row_scales(const KvqRows& rows, int64_t block, int head, int64_t offset) {
    return rows.scales + block * rows.scales_block + head * rows.scales_head + offset * rows.scales_slot;
}

constexpr int MOST_PAIRED_BITS = 4, MOST_SHIFTED = 2, CENTER_STEP = 16;  // see codec/channel.py

inline bool is_paired(const KvqRows& rows) { return rows.channels && rows.code != KVQ_INT8 && rows.bits <= MOST_PAIRED_BITS; }

// Return the bits of a channel, from its scale byte and that of its partner.
inline int share_of(int own, int other, int bits) {
    int more = own - other, shifted = ((more < 0 ? -more : more) + 8) >> 4, most = bits - 1 < MOST_SHIFTED ? bits - 1 : MOST_SHIFTED;
    if (shifted > most) shifted = most;
    return more < 0 ? bits - shifted : bits + shifted;
}

// Decoding parameters for the channels of a block.
struct Channels {
    float scale[MOST_DIM], offset[MOST_DIM];
    uint8_t bits[MOST_DIM];
};

inline void read_channels(Channels& c, const KvqRows& rows, const uint8_t* scales) {
    int dim = rows.dim;
    if (rows.code == KVQ_INT8) {
        for (int i = 0; i < dim; i++) {
            c.scale[i] = narrow_scale(scales[i]);
            c.offset[i] = (float)((int8_t)scales[dim + i] * CENTER_STEP) * c.scale[i];
        }
        return;
    }
    bool paired = is_paired(rows);
    float levels = (float)((1 << rows.bits) - 1);
    for (int i = 0; i < dim; i++) {
        c.bits[i] = (uint8_t)(paired ? share_of(scales[i], scales[dim - 1 - i], rows.bits) : rows.bits);
        c.scale[i] = narrow_scale(scales[i]) * (levels / (float)((1 << c.bits[i]) - 1));
    }
    uint16_t minimums[MOST_DIM];
    memcpy(minimums, scales + dim, (size_t)dim * 2);
    read_fp16(c.offset, minimums, dim);
}

inline void read_channel_row(float* __restrict out, const uint8_t* codes, const Channels& c, const KvqRows& rows) {
    int dim = rows.dim;
    if (rows.code == KVQ_INT8) {
        for (int i = 0; i < dim; i++) out[i] = (float)(int8_t)codes[i] * c.scale[i] + c.offset[i];
        return;
    }
    uint8_t q[MOST_DIM];
    if (is_paired(rows)) {
        unpack_codes(q, codes, dim / 2, 2 * rows.bits);
        for (int i = 0; i < dim / 2; i++) {
            int both = q[i], own = c.bits[i];
            q[i] = (uint8_t)(both & ((1 << own) - 1));
            out[dim - 1 - i] = (float)(both >> own) * c.scale[dim - 1 - i] + c.offset[dim - 1 - i];
        }
        dim /= 2;
    } else {
        unpack_codes(q, codes, dim, rows.bits);
    }
    for (int i = 0; i < dim; i++) out[i] = (float)q[i] * c.scale[i] + c.offset[i];
}

// Decode one token row into `out`, still rotated. Elements past `dim` stay as they are.
inline void read_row(float* __restrict out, const KvqRows& rows, int64_t block, int head, int offset) {
    const uint8_t* codes = row_codes(rows, block, head, offset);
    const uint8_t* scales = rows.scales ? row_scales(rows, block, head, offset) : nullptr;
    if (rows.code <= KVQ_FP16) return read_floats(out, codes, rows.dim, rows.code);
    if (rows.channels) {
        Channels c;
        read_channels(c, rows, scales);
        return read_channel_row(out, codes, c, rows);
    }
    if (rows.code == KVQ_INT4) return read_int4(out, codes, scales, rows);
    if (rows.code == KVQ_GROUPED) return read_grouped(out, codes, scales, rows);
    float scale = scales ? from_fp16(*(const uint16_t*)scales) : rows.static_scales[head];
    if (rows.code == KVQ_FP8)
        return convert_bytes(out, codes, rows.dim, [=](vi c) { return fp8_values(c) * scale; });
    convert_bytes(out, codes, rows.dim, [=](vi c) { return floats((c ^ 128) - 128) * scale; });
}

}  // namespace
