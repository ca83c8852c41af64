// Sixteen outputs in registers: codes of a panel times inputs, and the float arithmetic after them.
//
// A register of codes contains W outputs x 4 adjacent inputs, one byte each and never negative: INT8 as
// q + 128, INT4 as q + 8. Four signed bytes of inputs are multiplied by each output's four, and the sums
// added to W 32-bit numbers, as one VNNI instruction does; nothing is ever summed across lanes.
#pragma once

#include "../native/rows.h"

namespace {

constexpr int OUTPUTS = 16;         // of a panel
constexpr int PARTS = OUTPUTS / W;  // registers with one number of each

struct Floats {
    vf part[PARTS];
};

// Set the addresses of a panel's outputs among those of `parts`, which follow each other; others stay as they are.
inline void find_rows(const uint8_t* rows[OUTPUTS], const KvqMatrix* parts, int count, int64_t panel) {
    int64_t first = panel * OUTPUTS;  // of the part's own outputs, from the next line on
    for (int i = 0; i < count; first -= parts[i++].rows)
        for (int o = 0; o < OUTPUTS; o++)
            if (first + o >= 0 && first + o < parts[i].rows) rows[o] = parts[i].data + (first + o) * parts[i].row;
}

// The only contraction there is (the file is compiled with none): every tile rounds alike.
inline vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX2__)
    return (vf)KVQ_MM(fmadd_ps)(a, b, c);
#else
    return a * b + c;
#endif
}

// A register of codes, four inputs of W outputs.
typedef uint8_t Codes __attribute__((vector_size(4 * W)));

// `Weights` is a register of codes prepared for `dot`, which adds four products to each of W sums.
// `offset`: the difference between its codes and q.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
// Pairs of products are summed in 16 bits: 2 * 15 * 127 fits, 2 * 255 * 127 does not. INT8 is therefore
// multiplied as magnitudes of up to 128, by inputs that get the sign: 2 * 128 * 127 fits.
#if defined(__AVX512F__)
typedef __mmask64 Signs;
inline Signs signs_of(reg q) { return _mm512_movepi8_mask(q); }
inline reg signed_by(Signs signs, reg x) { return _mm512_mask_sub_epi8(x, signs, _mm512_setzero_si512(), x); }
#else
typedef reg Signs;
inline Signs signs_of(reg q) { return q; }
inline reg signed_by(Signs signs, reg x) { return _mm256_sign_epi8(x, signs); }
#endif
struct Weights {
    reg magnitudes;
    Signs signs;
};
template <bool NIBBLES>
constexpr int offset = NIBBLES ? 8 : 0;
template <bool NIBBLES>
inline Weights ready(Codes codes) {
    if (NIBBLES) return {(reg)codes, Signs{}};
    reg q = (reg)(codes ^ 128);
    return {KVQ_MM(abs_epi8)(q), signs_of(q)};
}
template <bool NIBBLES>
inline vi dot(vi sums, Weights w, int32_t inputs) {
    reg x = KVQ_MM(set1_epi32)(inputs);
    if (!NIBBLES) x = signed_by(w.signs, x);
    return sums + (vi)KVQ_MM(madd_epi16)(KVQ_MM(maddubs_epi16)(w.magnitudes, x), KVQ_MM(set1_epi16)(1));
}
#else
typedef Codes Weights;
template <bool NIBBLES>
constexpr int offset = NIBBLES ? 8 : 128;
template <bool NIBBLES>
inline Weights ready(Codes codes) {
    return codes;
}
template <bool NIBBLES>
inline vi dot(vi sums, Weights w, int32_t inputs) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((reg)sums, (reg)w, _mm512_set1_epi32(inputs));
#else
    int8_t x[4];
    memcpy(x, &inputs, 4);
    for (int o = 0; o < W; o++)
        for (int i = 0; i < 4; i++) sums[o] += w[4 * o + i] * x[i];
    return sums;
#endif
}
#endif

inline vi all_of(int32_t x) { return x - vi{}; }

// Sixteen numbers in floats of `code`: a column of a panel, or its scales of one group.
inline Floats load_floats(const uint8_t* p, int code) {
    Floats x;
    for (int i = 0; i < PARTS; i++) {
        if (code == KVQ_FP32) {
            x.part[i] = load((const float*)p + i * W);
            continue;
        }
        const uint8_t* at = p + i * W * 2;
#if defined(__AVX2__)
        half_reg bits = load_as<half_reg>(at);
        x.part[i] = code == KVQ_BF16 ? (vf)KVQ_MM(slli_epi32)(KVQ_MM(cvtepu16_epi32)(bits), 16)
                                     : (vf)KVQ_MM(cvtph_ps)(bits);
#else
        float values[W];
        read_floats(values, at, W, code);
        x.part[i] = load(values);
#endif
    }
    return x;
}

// A panel's zero points of one group, negated.
inline Floats load_minus_zeros(const int8_t* p) {
    Floats x;
    for (int i = 0; i < PARTS; i++)
        x.part[i] = -floats((load_bytes((const uint8_t*)p + i * W) ^ 128) - 128);
    return x;
}

// E4M3 codes as floats: 64 bytes of four inputs, where byte 2 (16 h + o) + b is output o of input h + 2 b.
// The bytes of a 16-bit lane thus belong to two inputs, and shifts alone yield fp16 numbers, which have the
// same mantissa bits further up and a larger exponent offset: they are 2^-8 of the value.
#if defined(__AVX2__)
constexpr float FP8_FACTOR = 256.0f;
#else
constexpr float FP8_FACTOR = 1.0f;
#endif

#if defined(__AVX512F__)
inline void split(half_reg out[2], reg x) { out[0] = _mm512_castsi512_si256(x), out[1] = _mm512_extracti64x4_epi64(x, 1); }
#elif defined(__AVX2__)
inline void split(half_reg out[2], reg x) { out[0] = _mm256_castsi256_si128(x), out[1] = _mm256_extracti128_si256(x, 1); }
#endif

inline void decode_fp8(Floats out[4], const uint8_t* p) {
#if defined(__AVX2__)
    const reg keep = KVQ_MM(set1_epi16)((short)0xbf80);
    for (int i = 0; i < PARTS; i++) {  // registers, each with W numbers of two inputs or 2 W of one
        reg x = load_as<reg>(p + 4 * W * i);
        half_reg even[2], odd[2];
        split(even, KVQ_MM(srai_epi16)(KVQ_MM(slli_epi16)(x, 8), 1) & keep);
        split(odd, KVQ_MM(srai_epi16)(x, 1) & keep);
        for (int j = 0; j < 2; j++) {
            int at = 2 * i + j;
            out[at / PARTS].part[at % PARTS] = (vf)KVQ_MM(cvtph_ps)(even[j]);
            out[2 + at / PARTS].part[at % PARTS] = (vf)KVQ_MM(cvtph_ps)(odd[j]);
        }
    }
#else
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < PARTS; j++) {
            vi codes;
            for (int o = 0; o < W; o++) codes[o] = p[2 * (16 * (i & 1) + j * W + o) + (i >> 1)];
            out[i].part[j] = fp8_values(codes);
        }
#endif
}

// Two columns of bf16, stored as pairs for one output each.
inline void decode_pairs(Floats out[2], const uint8_t* p) {
    for (int i = 0; i < PARTS; i++) {
        vi both = load_as<vi>(p + i * W * 4);
        out[0].part[i] = (vf)(both << 16);
        out[1].part[i] = (vf)(both & (vi{} + (int32_t)0xffff0000));
    }
}

// Columns that are decoded at a time.
constexpr int columns_of(int code) { return code == KVQ_FP8 ? 4 : code == KVQ_BF16 ? 2 : 1; }

template <int CODE>
inline void decode_columns(Floats* out, const uint8_t* p) {
    if constexpr (CODE == KVQ_FP8)
        decode_fp8(out, p);
    else if constexpr (CODE == KVQ_BF16)
        decode_pairs(out, p);
    else
        out[0] = load_floats(p, CODE);
}

}  // namespace
