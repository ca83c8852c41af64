// Reading rows: dense ones of any float dtype, and quantized ones out of blocks.
#pragma once

#include "abi.h"
#include "vectors.h"

namespace {

constexpr int MOST_DIM = 4096;  // elements of a row
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

// Then zeros up to a whole register.
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

// W bytes as integers.
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

// One load per packed byte: element i in the low half of byte i, element i + dim / 2 in the high one.
inline void read_int4(float* out, const uint8_t* codes, const uint16_t* scales, int dim, int group) {
    int half = dim / 2, run = group < half ? group : half;
    for (int at = 0; at < half; at += run) {
        const uint16_t *low = scales + 2 * (at / group), *high = scales + 2 * ((half + at) / group);
        float s = from_fp16(low[0]), m = from_fp16(low[1]);
        convert_bytes(out + at, codes + at, run, [=](vi c) { return floats(c & 15) * s + m; });
        float t = from_fp16(high[0]), n = from_fp16(high[1]);
        convert_bytes(out + half + at, codes + at, run, [=](vi c) { return floats(c >> 4) * t + n; });
    }
}

// Put the bits of one plane where they belong in codes `q`; returns what follows the plane.
template <int WIDTH>
inline const uint8_t* read_plane(uint8_t* q, const uint8_t* codes, int dim, int shift) {
    int run = dim * WIDTH / 8;
    for (int part = 0; part < 8 / WIDTH; part++)
        for (int i = 0; i < run; i++)
            q[part * run + i] |= (uint8_t)(((codes[i] >> WIDTH * part) & ((1 << WIDTH) - 1)) << shift);
    return codes + run;
}

// Codes of one plane, straight from its bytes; groups may end inside one of the row's parts.
inline void read_one_plane(float* out, const uint8_t* codes, const uint16_t* scales, int dim, int group, int bits) {
    int length = dim * bits / 8, mask = (1 << bits) - 1;
    for (int at = 0; at < dim;) {
        int part = at / length, byte = at - part * length, shift = bits * part;
        int to_group = group - at % group, run = length - byte < to_group ? length - byte : to_group;
        float s = from_fp16(scales[2 * (at / group)]), m = from_fp16(scales[2 * (at / group) + 1]);
        convert_bytes(out + at, codes + byte, run, [=](vi c) { return floats((c >> shift) & mask) * s + m; });
        at += run;
    }
}

// Codes of any width, in planes; see codec/reference.py.
inline void read_grouped(float* out, const uint8_t* codes, const uint16_t* scales, int dim, int group, int bits) {
    if ((bits & (bits - 1)) == 0) return read_one_plane(out, codes, scales, dim, group, bits);
    uint8_t q[MOST_DIM] = {};
    if (bits & 8) codes = read_plane<8>(q, codes, dim, 0);
    if (bits & 4) codes = read_plane<4>(q, codes, dim, bits & 8);
    if (bits & 2) codes = read_plane<2>(q, codes, dim, bits & 12);
    if (bits & 1) read_plane<1>(q, codes, dim, bits & 14);
    for (int at = 0; at < dim; at += group) {
        float s = from_fp16(scales[2 * (at / group)]), m = from_fp16(scales[2 * (at / group) + 1]);
        convert_bytes(out + at, q + at, group, [=](vi c) { return floats(c) * s + m; });
    }
}

inline uint8_t* row_codes(const KvqRows& rows, int64_t block, int head, int64_t offset) {
    return rows.codes + block * rows.codes_block + head * rows.codes_head + offset * rows.codes_slot;
}

inline uint8_t* row_scales(const KvqRows& rows, int64_t block, int head, int64_t offset) {
    return rows.scales + block * rows.scales_block + head * rows.scales_head + offset * rows.scales_slot;
}

// Decode one token row into `out`, still rotated. Elements past `dim` stay as they are.
inline void read_row(float* __restrict out, const KvqRows& rows, int64_t block, int head, int offset) {
    const uint8_t* codes = row_codes(rows, block, head, offset);
    const uint16_t* scales = rows.scales ? (const uint16_t*)row_scales(rows, block, head, offset) : nullptr;
    if (rows.code <= KVQ_FP16) return read_floats(out, codes, rows.dim, rows.code);
    if (rows.code == KVQ_INT4) return read_int4(out, codes, scales, rows.dim, rows.group_size);
    if (rows.code == KVQ_GROUPED)
        return read_grouped(out, codes, scales, rows.dim, rows.group_size, rows.bits);
    float scale = scales ? from_fp16(scales[0]) : rows.static_scales[head];
    if (rows.code == KVQ_FP8)
        return convert_bytes(out, codes, rows.dim, [=](vi c) { return fp8_values(c) * scale; });
    convert_bytes(out, codes, rows.dim, [=](vi c) { return floats((c ^ 128) - 128) * scale; });
}

}  // namespace
