// Vectors as wide as the variant's registers, and their operations for the kernels.
//
// The same sources are compiled once per variant. Everything here has internal linkage and nothing
// comes from the C++ library: an inline function that two variants share would be merged by the
// linker, and the older CPU might get the newer one's instructions.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

// W: floats in a register. KVQ_MM(name): the intrinsic for registers of this width. KVQ_LANES(f): f of every lane.
#if defined(__AVX512F__)
constexpr int W = 16;
#define KVQ_MM(name) _mm512_##name
#define KVQ_LANES(f) \
    f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#elif defined(__AVX2__)
constexpr int W = 8;
#define KVQ_MM(name) _mm256_##name
#define KVQ_LANES(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#else
constexpr int W = 4;
#define KVQ_LANES(f) f(0), f(1), f(2), f(3)
#endif

// GCC treats a function that only prefetches as one without any effect, and drops calls to it.
#define KVQ_PREFETCHES inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
#if defined(__AVX512F__)
typedef __m512i reg;
typedef __m256i half_reg;
#elif defined(__AVX2__)
typedef __m256i reg;
typedef __m128i half_reg;
#endif

template <class V>
// D91: the compiler's vectors; intrinsics where GCC 12 is slow
inline V load_as(const void* p) {
    V x;
    memcpy(&x, p, sizeof x);
    return x;
}

inline vf load(const float* p) { return load_as<vf>(p); }

// Store a whole register at once, even if it was just loaded, where memcpy would become several stores of 8 bytes.
inline void store(float* p, vf x) {
    typedef float anywhere __attribute__((vector_size(sizeof(vf)), aligned(4), may_alias));
    *(anywhere*)p = (anywhere)x;
}

inline vf all(float x) { return x - vf{}; }

// Lane i of the result is lane f(i) of `a`, or lane f(i) - W of `b`.
#if defined(__clang__)
#define KVQ_PICKED(a, b, f) __builtin_shufflevector(a, b, KVQ_LANES(f))
#else  // GCC knows that name from version 12 on
#define KVQ_PICKED(a, b, f) __builtin_shuffle(a, b, vi{KVQ_LANES(f)})
#endif

// Lanes are summed by quarters of a register, which CPUs shuffle fastest: from four registers into one,
// whose quarters contain the four sums of that quarter, then over quarters.
constexpr int quarter(int i) { return i & ~3; }
constexpr int first_pairs(int i) { return quarter(i) + (i >> 1 & 1) + (i & 1) * W; }  // 0, W, 1, W + 1 of each quarter
constexpr int last_pairs(int i) { return first_pairs(i) + 2; }
constexpr int first_halves(int i) { return quarter(i) + (i & 1) + (i >> 1 & 1) * W; }  // 0, 1, W, W + 1
constexpr int last_halves(int i) { return first_halves(i) + 2; }
constexpr int even_quarter(int i) { return i + quarter(i); }
constexpr int odd_quarter(int i) { return even_quarter(i) + 4; }

// Lane 4 k + i of the result is the sum of lanes 4 k to 4 k + 3 of the i-th argument.
template <class V>
inline V quarter_sums(V a, V b, V c, V d) {
    V ab = KVQ_PICKED(a, b, first_pairs) + KVQ_PICKED(a, b, last_pairs);
    V cd = KVQ_PICKED(c, d, first_pairs) + KVQ_PICKED(c, d, last_pairs);
    return KVQ_PICKED(ab, cd, first_halves) + KVQ_PICKED(ab, cd, last_halves);
}

// Even and odd quarters of a, then of b.
template <class V>
inline V even_quarters(V a, V b) {
    return KVQ_PICKED(a, b, even_quarter);
}

template <class V>
inline V odd_quarters(V a, V b) {
    return KVQ_PICKED(a, b, odd_quarter);
}

// From N registers of quarter sums, of as many quarters: W / 4 yield the sums of W registers, lane by lane.
template <int N, class V>
inline V sums_of_quarters(const V* x) {
    if constexpr (N == 1) return x[0];
    if constexpr (N > 1) {
        V a = sums_of_quarters<N / 2>(x), b = sums_of_quarters<N / 2>(x + N / 2);
        return even_quarters(a, b) + odd_quarters(a, b);
    }
}

// Lane i of the result is the sum of x[i]'s lanes.
inline vf sums_of(const vf x[W]) {
    vf quarters[W / 4];
    for (int i = 0; i < W / 4; i++) quarters[i] = quarter_sums(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    return sums_of_quarters<W / 4>(quarters);
}

#if defined(__AVX512F__)
// Transpose 16 vectors of 16.
inline void transpose(vf x[16]) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps((__m512)x[i], (__m512)x[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps((__m512)x[i], (__m512)x[i + 1]);
    }
    __m512d y[16];
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + 2 + j]);
            y[i + 2 * j] = _mm512_unpacklo_pd(a, b);
            y[i + 2 * j + 1] = _mm512_unpackhi_pd(a, b);
        }
    __m512 z[16];
    for (int i = 0; i < 4; i++) {
        __m512 a = _mm512_castpd_ps(y[i]), b = _mm512_castpd_ps(y[i + 4]);
        __m512 c = _mm512_castpd_ps(y[i + 8]), d = _mm512_castpd_ps(y[i + 12]);
        z[i] = _mm512_shuffle_f32x4(a, b, 0x88);
        z[i + 4] = _mm512_shuffle_f32x4(a, b, 0xdd);
        z[i + 8] = _mm512_shuffle_f32x4(c, d, 0x88);
        z[i + 12] = _mm512_shuffle_f32x4(c, d, 0xdd);
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            x[i + 4 * j] = (vf)_mm512_shuffle_f32x4(z[i + 4 * j], z[i + 4 * j + 8], 0x88);
            x[i + 4 * j + 8] = (vf)_mm512_shuffle_f32x4(z[i + 4 * j], z[i + 4 * j + 8], 0xdd);
        }
}
#else
// Swap blocks of H lanes beside the diagonal.
template <int H>
constexpr int left_lanes(int i) { return i & H ? W + i - H : i; }
template <int H>
constexpr int right_lanes(int i) { return i & H ? W + i : i + H; }

// Transpose W vectors of W.
template <int H = W / 2>
inline void transpose(vf x[W]) {
    for (int i = 0; i < W; i++) {
        if (i & H) continue;
        vf a = x[i], b = x[i + H];
        x[i] = KVQ_PICKED(a, b, left_lanes<H>);
        x[i + H] = KVQ_PICKED(a, b, right_lanes<H>);
    }
    if constexpr (H > 1) transpose<H / 2>(x);
}
#endif

inline vf maximum(vf a, vf b) { return a > b ? a : b; }

// Swap lanes that are half a register, a quarter ... apart.
template <int H, class V>
inline V swapped(V x) {
    V y;
    for (int i = 0; i < W; i++) y[i] = x[i ^ H];  // the compiler makes this one shuffle
    return y;
}

// Combine all lanes by `join`.
template <int H = W / 2, class V, class Join>
inline auto joined(V x, Join join) {
    x = join(x, swapped<H>(x));
    if constexpr (H > 1) return joined<H / 2>(x, join);
    return x[0];
}

inline float sum(vf x) {
    return joined(x, [](vf a, vf b) { return a + b; });
}

inline int32_t sum(vi x) {
    return joined(x, [](vi a, vi b) { return a + b; });
}

inline float largest(vf x) {
    return joined(x, [](vf a, vf b) { return maximum(a, b); });
}

inline int32_t largest(vi x) {
    return joined(x, [](vi a, vi b) { return a > b ? a : b; });
}

// e^x for x <= 0 to 2 ulp; 0 below -87.
// Source: Cephes, expf: reduction by ln 2 in two parts, then a polynomial of degree 5.
inline vf exp_of(vf x) {
    const vf lowest = all(-87.0f);
    vi tiny = x < lowest;
    x = tiny ? lowest : x;
    const vf magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    vf shifted = x * 1.44269504088896341f + magic;
    vf n = shifted - magic;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = bits << 23;  // the integer n in the exponent's place
    vi value;
    memcpy(&value, &p, sizeof value);
    value += bits;
    memcpy(&p, &value, sizeof p);
    return tiny ? vf{} : p;
}

inline float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline float from_bf16(uint16_t h) { return float_of_bits((uint32_t)h << 16); }

inline uint16_t to_bf16(float x) {  // nearest even; x is finite or infinite
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_fp16(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    if (magnitude < 0x0400) {  // subnormal: the mantissa times 2^-24
        float x = (float)magnitude * 5.9604644775390625e-8f;
        return sign ? -x : x;
    }
    return float_of_bits(sign | ((magnitude << 13) + (112u << 23)));
#endif
}

inline uint16_t to_fp16(float x) {  // nearest even
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // subnormal in fp16: 0.5 has steps of 2^-24
        float shifted = float_of_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (bits_of(shifted) - 0x3f000000));
    }
    uint32_t rounded = magnitude - (112u << 23);
    return (uint16_t)(sign | ((rounded + 0xfff + ((rounded >> 13) & 1)) >> 13));
#endif
}

inline int hadamard_block(int dim) { return dim & -dim; }

// The stages within a register from H on: lane i becomes x[i] + x[i + H] or x[i - H] - x[i].
template <int H = 1>
inline vf butterflies(vf x) {
    vf sign;
    for (int i = 0; i < W; i++) sign[i] = i & H ? -1.0f : 1.0f;
    x = swapped<H>(x) + x * sign;  // the product is exact
    if constexpr (2 * H < W) x = butterflies<2 * H>(x);
    return x;
}

// Rotate a row in place whose blocks are whole registers.
inline void rotate_wide(float* x, int dim, int block, float scale) {
    for (int i = 0; i < dim; i += W) store(x + i, butterflies(load(x + i)));
    for (int h = W; h < block; h *= 2)
        for (int at = 0; at < dim; at += 2 * h)
            for (int i = at; i < at + h; i += W) {
                vf low = load(x + i), high = load(x + i + h);
                store(x + i, low + high);
                store(x + i + h, low - high);
            }
    for (int i = 0; i < dim; i += W) store(x + i, load(x + i) * scale);
}

// Rotate a row of `dim` floats in place, as kvq/kernels/codec/hadamard.py does, bit for bit.
inline void rotate(float* x, int dim) {
    int block = hadamard_block(dim);
    float scale = (float)(1.0 / __builtin_sqrt((double)block));
    if (block >= W) return rotate_wide(x, dim, block, scale);
    for (int h = 1; h < block; h *= 2)
        for (int at = 0; at < dim; at += 2 * h)
            for (int i = at; i < at + h; i++) {
                float low = x[i], high = x[i + h];
                x[i] = low + high;
                x[i + h] = low - high;
            }
    for (int i = 0; i < dim; i++) x[i] *= scale;
}

}  // namespace
