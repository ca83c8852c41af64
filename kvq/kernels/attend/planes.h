// Conversion of codes in planes (see codec/packing.py) to the bytes that integer kernels read.
//
// Codes of less than 4 bits become nibbles in the layout of INT4, wider codes bytes. In both, a plane of width w
// adds to byte j ((plane[j % n] >> w * (j / n)) & mask) << shift, where n is the plane's bytes: halves of a
// row are whole parts of each plane, so nibbles only need a mask for two elements at once. Registers that
// contain several parts repeat the plane's bytes and shift every 64 bits by a separate count.
#pragma once

#include "task.h"

#if defined(__AVX2__)

namespace {

constexpr int LANES = W / 2;  // of 64 bits in a register
typedef uint64_t words __attribute__((vector_size(W * 4)));

// Codes of less than 4 bits become nibbles.
constexpr bool in_nibbles(int bits) { return bits < 4; }

// Mask of a plane's shifted byte for one element (and, for nibbles, for the one half a row further).
constexpr int plane_mask(int bits, int plane) { return ((1 << plane) - 1) * (in_nibbles(bits) ? 0x11 : 1); }

// Repeat the N bytes at `p`.
template <int N>
inline words repeated(const uint8_t* p) {
    if constexpr (N == 8) return load_as<uint64_t>(p) + words{};
    if constexpr (N == 16 && W == 8) return (words)_mm256_broadcastsi128_si256(load_as<__m128i>(p));
#if defined(__AVX512F__)
    if constexpr (N == 16) return (words)_mm512_broadcast_i32x4(load_as<__m128i>(p));
    if constexpr (N == 32) return (words)_mm512_broadcast_i64x4(load_as<__m256i>(p));
#endif
    return load_as<words>(p);
}

// Return the bits of a plane of PLANE bits for the register at byte AT of a row of DIM elements, shifted by `shift`.
template <int BITS, int PLANE, int DIM, int AT>
inline words plane_bits(const uint8_t* plane, int shift) {
    constexpr int N = DIM * PLANE / 8, FIRST = AT / N * PLANE;
    constexpr uint64_t MASK = 0x0101010101010101ull * plane_mask(BITS, PLANE);
    words x = repeated<(N < 4 * W ? N : 4 * W)>(plane + AT % N);
    if constexpr (N < 4 * W) {
        words counts;
        for (int i = 0; i < LANES; i++) counts[i] = (uint64_t)((AT + 8 * i) / N * PLANE);
        x >>= counts;
    } else if constexpr (FIRST > 0) {
        x >>= FIRST;
    }
    return (x & MASK) << shift;
}

template <int BITS, int DIM, int AT>
inline void expand_from(uint8_t* out, const uint8_t* row) {
    constexpr int BYTES_OUT = in_nibbles(BITS) ? DIM / 2 : DIM;
    if constexpr (AT < BYTES_OUT) {
        words x{};
        if constexpr (BITS & 4) x |= plane_bits<BITS, 4, DIM, AT>(row, 0);
        if constexpr (BITS & 2) x |= plane_bits<BITS, 2, DIM, AT>(row + DIM * (BITS & 4) / 8, BITS & 4);
        if constexpr (BITS & 1) x |= plane_bits<BITS, 1, DIM, AT>(row + DIM * (BITS & 6) / 8, BITS & 6);
        memcpy(out + AT, &x, sizeof x);  // rows of scratch memory are whole registers
        expand_from<BITS, DIM, AT + 4 * W>(out, row);
    }
}

typedef uint64_t two_words __attribute__((vector_size(16)));

// Return a plane's bits for the V at byte `at` of a row's `step`-th piece; pieces have the `n` bytes of the narrowest
// plane, so that each is in one part of every plane.
template <int BITS, int PLANE, class V>
inline V piece_bits(const uint8_t* plane, unsigned step, int n, int at, int shift) {
    constexpr unsigned PIECES = PLANE / (BITS & -BITS);  // in a part
    constexpr uint64_t MASK = 0x0101010101010101ull * plane_mask(BITS, PLANE);
    V x = load_as<V>(plane + step % PIECES * n + at) >> (uint64_t)(step / PIECES * PLANE);
    return (V)((x & (V)(MASK - V{})) << (uint64_t)shift);
}

// The same for rows of any width, a V at a time. The last one of a piece may overlap the one before.
template <int BITS, class V>
inline void expand_pieces(uint8_t* out, const uint8_t* row, int dim) {
    constexpr int STEP = sizeof(V), PIECES = (in_nibbles(BITS) ? 4 : 8) / (BITS & -BITS);
    int n = dim * (BITS & -BITS) / 8;
    for (int step = 0; step < PIECES; step++, out += n)
        for (int at = 0; at < n; at += STEP) {
            if (at > n - STEP) at = n - STEP;
            V x{};
            if constexpr (BITS & 4) x |= piece_bits<BITS, 4, V>(row, step, n, at, 0);
            if constexpr (BITS & 2) x |= piece_bits<BITS, 2, V>(row + dim * (BITS & 4) / 8, step, n, at, BITS & 4);
            if constexpr (BITS & 1) x |= piece_bits<BITS, 1, V>(row + dim * (BITS & 6) / 8, step, n, at, BITS & 6);
            memcpy(out + at, &x, STEP);
        }
}

template <int BITS>
inline void expand_any(uint8_t* out, const uint8_t* row, int dim) {
    int n = dim * (BITS & -BITS) / 8;
    if (n >= 4 * W) return expand_pieces<BITS, words>(out, row, dim);
    if (n >= 16) return expand_pieces<BITS, two_words>(out, row, dim);
    if (n >= 8) return expand_pieces<BITS, uint64_t>(out, row, dim);
    expand_pieces<BITS, uint8_t>(out, row, dim);
}

typedef void (*ExpandKernel)(uint8_t* out, int stride, const uint8_t* const* rows, int dim);

// Expand the rows of a tile, of DIM elements, or of any number (0).
template <int BITS, int DIM>
// D96: planes become nibbles or bytes, tile by tile
inline void expand_tile(uint8_t* out, int stride, const uint8_t* const* rows, int dim) {
    for (int i = 0; i < TILE; i++, out += stride)
        if constexpr (DIM == 0)
            expand_any<BITS>(out, rows[i], dim);
        else
            expand_from<BITS, DIM, 0>(out, rows[i]);
}

template <int BITS>
inline ExpandKernel expand_kernel(int dim) {
    if (dim == 64) return expand_tile<BITS, 64>;
    if (dim == 128) return expand_tile<BITS, 128>;
    if (dim == 256) return expand_tile<BITS, 256>;
    return expand_tile<BITS, 0>;
}

inline ExpandKernel expand_kernel(int dim, int bits) {
    if (bits == 2) return expand_kernel<2>(dim);
    if (bits == 3) return expand_kernel<3>(dim);
    return bits == 5 ? expand_kernel<5>(dim) : expand_kernel<6>(dim);
}

}  // namespace
#endif
