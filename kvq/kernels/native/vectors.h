// Vectors as wide as the variant's registers, and what the kernels need of them.
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

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a register
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));

inline vf load(const float* p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

inline void store(float* p, vf x) { memcpy(p, &x, sizeof x); }

inline vf all(float x) { return x - vf{}; }

#if defined(__clang__)
#define KVQ_SHUFFLE __builtin_shufflevector
#else  // GCC knows that name from version 12 on
#define KVQ_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

// [sums of neighbours of a, sums of neighbours of b]
inline vf add_neighbours(vf a, vf b) {
#if defined(__AVX512F__)
    return KVQ_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           KVQ_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
    return KVQ_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + KVQ_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    return KVQ_SHUFFLE(a, b, 0, 2, 4, 6) + KVQ_SHUFFLE(a, b, 1, 3, 5, 7);
#endif
}

// Lane i of the result is the sum of x[i]'s lanes; overwrites x.
inline vf sums_of(vf x[W]) {
    for (int n = W / 2; n >= 1; n /= 2)
        for (int i = 0; i < n; i++) x[i] = add_neighbours(x[2 * i], x[2 * i + 1]);
    return x[0];
}

inline vf maximum(vf a, vf b) { return a > b ? a : b; }

inline float sum(vf x) {
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
}

inline float largest(vf x) {
    float top = x[0];
    for (int i = 1; i < W; i++) top = x[i] > top ? x[i] : top;
    return top;
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

// One stage inside a register: lane i becomes x[i] + x[i + H] or x[i - H] - x[i].
template <int H>
inline vf butterfly(vf x) {
    vf other, sign;  // shuffles and constants once the compiler is done
    for (int i = 0; i < W; i++) other[i] = x[i ^ H], sign[i] = i & H ? -1.0f : 1.0f;
    return other + x * sign;  // the product is exact
}

// Rotate a row in place whose blocks are whole registers.
inline void rotate_wide(float* x, int dim, int block, float scale) {
    for (int i = 0; i < dim; i += W) {
        vf y = butterfly<2>(butterfly<1>(load(x + i)));
#if defined(__AVX2__)
        y = butterfly<4>(y);
#endif
#if defined(__AVX512F__)
        y = butterfly<8>(y);
#endif
        store(x + i, y);
    }
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
