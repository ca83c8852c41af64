// Sixteen outputs in registers: codes of a panel times inputs, and what follows in floats.
//
// A register of codes holds W outputs x 4 neighbouring inputs, one byte each and never negative: INT8 as
// q + 128, INT4 as q + 8. Four signed bytes of inputs are multiplied with each output's four, and the sums
// added to W 32-bit numbers: what one VNNI instruction does, and nothing is ever summed across lanes.
#pragma once

#include "../native/rows.h"

namespace {

constexpr int OUTPUTS = 16;         // of a panel
constexpr int PARTS = OUTPUTS / W;  // registers that hold one number of each

struct Floats {
    vf part[PARTS];
};

// The only contraction there is (the file is compiled with none): every tile rounds alike.
inline vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

#if defined(__AVX512F__)
typedef __m512i reg;
inline reg load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline reg low_nibbles(reg x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline reg high_nibbles(reg x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
#elif defined(__AVX2__)
typedef __m256i reg;
inline reg load_codes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline reg low_nibbles(reg x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline reg high_nibbles(reg x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
#else
typedef uint8_t reg __attribute__((vector_size(16)));
inline reg load_codes(const uint8_t* p) {
    reg x;
    memcpy(&x, p, sizeof x);
    return x;
}
inline reg low_nibbles(reg x) { return x & 15; }
inline reg high_nibbles(reg x) { return x >> 4; }
#endif

// `Weights` is a register of codes made ready for `dot`, which adds four products to each of W sums.
// `offset`: what the codes in it are larger by than q.
#if defined(__AVX512VNNI__)
struct Weights {
    reg codes;
};
template <bool NIBBLES>
constexpr int offset = NIBBLES ? 8 : 128;
template <bool NIBBLES>
inline Weights ready(reg codes) {
    return {codes};
}
template <bool NIBBLES>
inline vi dot(vi sums, Weights w, int32_t inputs) {
    return (vi)_mm512_dpbusd_epi32((reg)sums, w.codes, _mm512_set1_epi32(inputs));
}
#elif defined(__AVX2__)
// Pairs of products are summed in 16 bits: 2 * 15 * 127 fits, 2 * 255 * 127 does not. So INT8 is multiplied
// as magnitudes of up to 128 with inputs that take the sign: 2 * 128 * 127 fits.
struct Weights {
    reg magnitudes;
#if defined(__AVX512F__)
    __mmask64 negative;
#else
    reg signs;
#endif
};
template <bool NIBBLES>
constexpr int offset = NIBBLES ? 8 : 0;
#if defined(__AVX512F__)
template <bool NIBBLES>
inline Weights ready(reg codes) {
    if (NIBBLES) return {codes, 0};
    reg q = _mm512_xor_si512(codes, _mm512_set1_epi8((char)128));
    return {_mm512_abs_epi8(q), _mm512_movepi8_mask(q)};
}
template <bool NIBBLES>
inline vi dot(vi sums, Weights w, int32_t inputs) {
    reg x = _mm512_set1_epi32(inputs);
    if (!NIBBLES) x = _mm512_mask_sub_epi8(x, w.negative, _mm512_setzero_si512(), x);
    return sums + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(w.magnitudes, x), _mm512_set1_epi16(1));
}
#else
template <bool NIBBLES>
inline Weights ready(reg codes) {
    if (NIBBLES) return {codes, codes};
    reg q = _mm256_xor_si256(codes, _mm256_set1_epi8((char)128));
    return {_mm256_abs_epi8(q), q};
}
template <bool NIBBLES>
inline vi dot(vi sums, Weights w, int32_t inputs) {
    reg x = _mm256_set1_epi32(inputs);
    if (!NIBBLES) x = _mm256_sign_epi8(x, w.signs);
    return sums + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(w.magnitudes, x), _mm256_set1_epi16(1));
}
#endif
#else
struct Weights {
    reg codes;
};
template <bool NIBBLES>
constexpr int offset = NIBBLES ? 8 : 128;
template <bool NIBBLES>
inline Weights ready(reg codes) {
    return {codes};
}
template <bool NIBBLES>
inline vi dot(vi sums, Weights w, int32_t inputs) {
    int8_t x[4];
    memcpy(x, &inputs, 4);
    for (int o = 0; o < W; o++)
        for (int i = 0; i < 4; i++) sums[o] += w.codes[4 * o + i] * x[i];
    return sums;
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
#if defined(__AVX512F__)
        __m256i bits = _mm256_loadu_si256((const __m256i*)at);
        x.part[i] = code == KVQ_BF16 ? (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)
                                     : (vf)_mm512_cvtph_ps(bits);
#elif defined(__AVX2__)
        __m128i bits = _mm_loadu_si128((const __m128i*)at);
        x.part[i] = code == KVQ_BF16 ? (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)
                                     : (vf)_mm256_cvtph_ps(bits);
#else
        float values[W];
        read_floats(values, at, W, code);
        x.part[i] = load(values);
#endif
    }
    return x;
}

// A panel's zero points of one group, negative.
inline Floats load_minus_zeros(const int8_t* p) {
    Floats x;
    for (int i = 0; i < PARTS; i++)
        x.part[i] = -floats((load_bytes((const uint8_t*)p + i * W) ^ 128) - 128);
    return x;
}

constexpr int bytes_of(int code) { return code == KVQ_FP32 ? 4 : code == KVQ_BF16 || code == KVQ_FP16 ? 2 : 1; }

// E4M3 codes as floats: 64 bytes of four inputs, where byte 2 (16 h + o) + b is output o of input h + 2 b.
// So the bytes of a 16-bit lane belong to two inputs, and shifts alone give fp16 numbers, which have the
// same mantissa bits further up and a larger exponent offset: they are 2^-8 of the value.
#if defined(__AVX2__)
constexpr float FP8_FACTOR = 256.0f;
#else
constexpr float FP8_FACTOR = 1.0f;
#endif

inline void decode_fp8(Floats out[4], const uint8_t* p) {
#if defined(__AVX512F__)
    reg x = load_codes(p), keep = _mm512_set1_epi16((short)0xbf80);
    reg even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 1), keep);
    reg odd = _mm512_and_si512(_mm512_srai_epi16(x, 1), keep);
    out[0].part[0] = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(even));
    out[1].part[0] = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
    out[2].part[0] = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(odd));
    out[3].part[0] = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
#elif defined(__AVX2__)
    reg keep = _mm256_set1_epi16((short)0xbf80);
    for (int h = 0; h < 2; h++) {
        reg x = load_codes(p + 32 * h);
        reg even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 1), keep);
        reg odd = _mm256_and_si256(_mm256_srai_epi16(x, 1), keep);
        out[h].part[0] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(even));
        out[h].part[1] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(even, 1));
        out[h + 2].part[0] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(odd));
        out[h + 2].part[1] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1));
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

// Columns of a panel: four of FP8, one of floats.
template <int CODE>
inline void decode_columns(Floats* out, const uint8_t* p) {
    if constexpr (CODE == KVQ_FP8)
        decode_fp8(out, p);
    else
        out[0] = load_floats(p, CODE);
}

}  // namespace
