// Writing rows into blocks: the codes and scales of codec/reference.py, bit for bit. Files that include this are
// compiled without contraction of a * b + c into one rounding, for the same reason.
#pragma once

#include "rows.h"

namespace {

constexpr float FP32_LARGEST = 3.40282346638528859812e38f, FP16_LARGEST = 65504.0f;

inline float clamped(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

inline float as_scale(float x) { return clamped(from_fp16(to_fp16(x)), SMALLEST_SCALE, FP16_LARGEST); }

inline uint8_t to_fp8(float x) {
    x = clamped(x, -448.0f, 448.0f);
    uint32_t sign = (bits_of(x) >> 24) & 0x80;
    float magnitude = float_of_bits(bits_of(x) & 0x7fffffff);
    uint32_t bits = bits_of(magnitude);
    uint32_t normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3);
    uint32_t subnormal = bits_of(magnitude + 16384.0f) - 0x46800000;
    return (uint8_t)((magnitude < 0.015625f ? subnormal : normal) | sign);
}

// Replace values that are not finite by zero; return true if there were any.
inline bool zero_not_finite(float* x, int n) {
    uint32_t found = 0;
    for (int i = 0; i < n; i++) {
        bool bad = (bits_of(x[i]) & 0x7f800000) == 0x7f800000;
        found |= bad;
        x[i] = bad ? 0.0f : x[i];
    }
    return found;
}

inline float largest_magnitude(const float* x, int n) {
    uint32_t top = 0;  // the magnitude bits of finite floats are ordered like their values
    for (int i = 0; i < n; i++) {
        uint32_t bits = bits_of(x[i]) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
    return float_of_bits(top);
}

// Pack one plane of codes `q`, 8 / WIDTH elements per byte; return where the next plane begins.
template <int WIDTH>
inline uint8_t* pack_plane(uint8_t* codes, const uint8_t* q, int dim, int shift) {
    int run = dim * WIDTH / 8;
    for (int i = 0; i < run; i++) {
        int packed = 0;
        for (int part = 0; part < 8 / WIDTH; part++)
            packed |= ((q[i + part * run] >> shift) & ((1 << WIDTH) - 1)) << WIDTH * part;
        codes[i] = (uint8_t)packed;
    }
    return codes + run;
}

// Return a scale's byte for codes of `bits` bits: the nearest one, or from 5 bits on the next not below it.
inline uint8_t narrow_code(float wanted, int bits) {
    wanted = clamped(wanted, narrow_scale(LEAST_NARROW), narrow_scale(MOST_NARROW));
    uint32_t code = ((bits_of(wanted) + (bits >= 5 ? (1u << 20) - 1 : 1u << 19)) >> 20) - (107u << 3);
    return (uint8_t)(code < MOST_NARROW ? code : MOST_NARROW);
}

// Scale and minimum of a group between `low` and `high`, as bytes; see codec/narrow.py.
inline void encode_narrow(uint8_t* pair, float low, float high, int bits, float levels) {
    float range = high - low, size = __builtin_fabsf(low);
    pair[0] = narrow_code((range > size ? range : size) / levels, bits);
    float steps = low / narrow_step(bits) / narrow_scale(pair[0]);
    pair[1] = (uint8_t)(int8_t)(int)clamped(__builtin_floorf(steps + 0.5f), -128.0f, 127.0f);
}

inline void encode_wide(uint16_t* pair, float low, float high, float levels) {
    pair[1] = to_fp16(clamped(low, -FP16_LARGEST, FP16_LARGEST) + 0.0f);  // never -0
    pair[0] = to_fp16(as_scale((high - from_fp16(pair[1])) / levels));
}

// Codes of 2 to 8 bits, in planes; see codec/packing.py.
inline void pack_codes(uint8_t* codes, const uint8_t* q, int dim, int bits) {
    if (bits & 8) codes = pack_plane<8>(codes, q, dim, 0);
    if (bits & 4) codes = pack_plane<4>(codes, q, dim, bits & 8);
    if (bits & 2) codes = pack_plane<2>(codes, q, dim, bits & 12);
    if (bits & 1) pack_plane<1>(codes, q, dim, bits & 14);
}

inline void encode_grouped(uint8_t* codes, uint8_t* scales, const float* x, const KvqRows& rows) {
    uint8_t q[MOST_DIM];
    int dim = rows.dim, group = rows.group_size, bits = rows.bits;
    float levels = (float)((1 << bits) - 1);
    for (int at = 0; at < dim; at += group) {
        const float* y = x + at;
        float low = y[0], high = y[0];
        for (int i = 1; i < group; i++) {
            low = y[i] < low ? y[i] : low;
            high = y[i] > high ? y[i] : high;
        }
        if (rows.cut != 0.0f) {
            float cut = high * rows.cut - low * rows.cut;
            low = low + cut, high = high - cut;
        }
        if (rows.narrow)
            encode_narrow(scales + 2 * (at / group), low, high, bits, levels);
        else
            encode_wide((uint16_t*)scales + 2 * (at / group), low, high, levels);
        Pair pair = pair_of(rows, scales, at / group);
        for (int i = 0; i < group; i++) {
            float code = __builtin_floorf((y[i] - pair.minimum) / pair.scale + 0.5f);
            q[at + i] = (uint8_t)(int)clamped(code, 0.0f, levels);
        }
    }
    pack_codes(codes, q, dim, bits);
}

// Scales and offsets of a block's channels between `low` and `high` [dim]; see codec/channel.py.
inline void encode_channel_scales(uint8_t* scales, const float* low, const float* high, const KvqRows& rows) {
    int dim = rows.dim;
    for (int i = 0; i < dim; i++) {
        if (rows.code == KVQ_INT8) {
            float center = low[i] * 0.5f + high[i] * 0.5f, half = (high[i] * 0.5f - low[i] * 0.5f) / (float)(127 - CENTER_STEP / 2);
            float least = __builtin_fabsf(center) / (float)(127 * CENTER_STEP);
            scales[i] = narrow_code(half > least ? half : least, 8);
            float steps = __builtin_floorf(center / (narrow_scale(scales[i]) * CENTER_STEP) + 0.5f);
            scales[dim + i] = (uint8_t)(int8_t)(int)clamped(steps, -127.0f, 127.0f);
        } else {
            uint16_t minimum = to_fp16(clamped(low[i], -FP16_LARGEST, FP16_LARGEST) + 0.0f);  // never -0
            scales[i] = narrow_code((high[i] - from_fp16(minimum)) / (float)((1 << rows.bits) - 1), rows.bits);
            memcpy(scales + dim + 2 * i, &minimum, 2);
        }
    }
}

// Encode a finite row of such a block.
inline void encode_channel_row(uint8_t* codes, const float* x, const Channels& c, const KvqRows& rows) {
    int dim = rows.dim;
    if (rows.code == KVQ_INT8) {
        for (int i = 0; i < dim; i++) {
            float code = __builtin_floorf((x[i] - c.offset[i]) / c.scale[i] + 0.5f);
            ((int8_t*)codes)[i] = (int8_t)(int)clamped(code, -127.0f, 127.0f);
        }
        return;
    }
    uint8_t q[MOST_DIM];
    for (int i = 0; i < dim; i++) {
        float code = __builtin_floorf((x[i] - c.offset[i]) / c.scale[i] + 0.5f);
        q[i] = (uint8_t)(int)clamped(code, 0.0f, (float)((1 << c.bits[i]) - 1));
    }
    if (!is_paired(rows)) return pack_codes(codes, q, dim, rows.bits);
    for (int i = 0; i < dim / 2; i++) q[i] |= (uint8_t)(q[dim - 1 - i] << c.bits[i]);
    pack_codes(codes, q, dim / 2, 2 * rows.bits);
}

inline void encode_symmetric(uint8_t* codes, const float* x, int dim, int code, float scale) {
    if (code == KVQ_FP8)
        for (int i = 0; i < dim; i++) codes[i] = to_fp8(x[i] / scale);
    else
        for (int i = 0; i < dim; i++)
            ((int8_t*)codes)[i] =
                (int8_t)(int)clamped(__builtin_floorf(x[i] / scale + 0.5f), -127.0f, 127.0f);
}

// Rotate a finite row, if the format rotates; no butterfly overflows.
inline void rotate_row(float* x, const KvqRows& rows) {
    if (!rows.rotated) return;
    float bound = FP32_LARGEST / (float)hadamard_block(rows.dim);
    for (int i = 0; i < rows.dim; i++) x[i] = clamped(x[i], -bound, bound);
    rotate(x, rows.dim);
}

// Store the finite row `x`, already rotated if the format rotates; it is overwritten.
inline void write_row(float* x, const KvqRows& rows, int64_t block, int head, int64_t offset) {
    int dim = rows.dim;
    uint8_t* codes = row_codes(rows, block, head, offset);
    uint8_t* scales = rows.scales ? row_scales(rows, block, head, offset) : nullptr;
    if (rows.code <= KVQ_FP16) {
        float largest = rows.code == KVQ_BF16 ? 3.3895313892515355e38f : FP16_LARGEST;
        if (rows.code != KVQ_FP32)
            for (int i = 0; i < dim; i++) x[i] = clamped(x[i], -largest, largest);
        return write_floats(codes, x, dim, rows.code);
    }
    if (rows.code >= KVQ_INT4) return encode_grouped(codes, scales, x, rows);
    float scale;
    if (scales) {
        scale = as_scale(largest_magnitude(x, dim) / (rows.code == KVQ_FP8 ? 448.0f : 127.0f));
        *(uint16_t*)scales = to_fp16(scale);
    } else {
        scale = rows.static_scales[head];
    }
    encode_symmetric(codes, x, dim, rows.code, scale);
}

}  // namespace
