// Weighted sums of a tile of V's nibbles as products of bytes, where the CPU sums four of them per lane.
//
// Rows of four tokens are transposed, so that a lane contains the same channels' bytes of all four. A mask and a shift
// make these codes. A weight of 15 bits is a high and a low byte with signs, and has one product for each; the sums are
// the same integers as elsewhere.
#pragma once

#include "integer_values.h"

#if defined(KVQ_INTEGER)

namespace {

constexpr int QUAD = 4;  // tokens
constexpr int TURNED = TILE / QUAD;

// Index of an element among an output row's floats, in the order of products of bytes.
inline int quad_index(const Cut& c, int dim, int element) {
    Place p = place_of(c, dim, element);
    int part = 2 * (p.byte / 32) + p.byte % 8 / 4;
    return ((p.chunk * 4 + part) * 2 + p.kind / 2) * W + p.byte % 32 / 8 * 4 + p.byte % 4;
}

// Add the sums of weights times minimums, as `add_minimums` does.
inline void add_quad_minimums(float* out, const IntegerWeights& w, const Cut& cut) {
    float sums[MOST_GROUPS];
    for (int g = 0; g < cut.groups; g++) sums[g] = sum(load(w.minimums + g * W));
    for (int run = 0; run < cut.runs; run++)
        for (int chunk = 0; chunk < cut.chunks; chunk++)
            for (int part = 0; part < 4; part++)
                for (int high = 0; high < 2; high++, out += W)
                    store(out, load(out) + all(sums[group_of(cut, run, high, cut.is_split ? part / 2 : 0)]));
}

#if defined(__AVX512VNNI__)
// Rows of whole registers, whose halves belong to one group each.
inline bool takes_quads(const Cut& c) {
    return c.is_nibbles && c.row_bytes % BYTES == 0 && (c.is_split || c.run_bytes % BYTES == 0);
}

// The adjacent halves of a row's register in the halves of its quarters.
inline reg by_halves(const uint8_t* row) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), load_as<reg>(row));
}

// Lane i of the result is the largest lane of x[i].
inline __m128 largest_of_four(const vf* x) {
    vf ab = maximum(KVQ_PICKED(x[0], x[1], first_pairs), KVQ_PICKED(x[0], x[1], last_pairs));
    vf cd = maximum(KVQ_PICKED(x[2], x[3], first_pairs), KVQ_PICKED(x[2], x[3], last_pairs));
    vf most = maximum(KVQ_PICKED(ab, cd, first_halves), KVQ_PICKED(ab, cd, last_halves));
    most = maximum(most, swapped<8>(most));
    return _mm512_castps512_ps128((__m512)maximum(most, swapped<4>(most)));
}

// Order of a tile's quads in memory, after two packs of registers: 0, 4, 8, 12, 1, 5, ...
constexpr int quad_at(int i) { return i % 4 * 4 + i / 4; }

// What `integer_weights` does, with weights as bytes: of a group [TILE] high ones, then [TILE] low ones, in quads of
// tokens in the order of `quad_at`.
inline void quad_weights(const IntegerWeights* out, const float* weights, const float* decays, int rows,
                         const Tile& tile, const Cut& cut) {
    static_assert(TILE == 4 * W, "two packs make one register of bytes");
    vf most[MOST_GROUPS];
    for (int g = cut.groups; g % 4; g++) most[g] = vf{};
    float factors[MOST_GROUPS];
    for (int r = 0; r < rows; r++) {
        const float* x = weights + r * TILE;
        for (int g = 0; g < cut.groups; g++) {
            const float* scales = tile.scales + g * tile.stride;
            vf a = maximum(load(x) * load(scales), load(x + W) * load(scales + W));
            vf b = maximum(load(x + 2 * W) * load(scales + 2 * W), load(x + 3 * W) * load(scales + 3 * W));
            most[g] = maximum(a, b);
        }
        for (int g = 0; g < cut.groups; g += 4) {
            __m128 top = largest_of_four(most + g), none = _mm_setzero_ps();
            top = top > _mm_set1_ps(NEGLIGIBLE) ? top : none;
            __m128 factor = top > none ? _mm_set1_ps(MOST_SPLIT - 1) / top : none;
            top /= _mm_set1_ps(MOST_SPLIT - 1);
            memcpy(factors + g, &factor, sizeof factor);
            memcpy(out[r].factors + g, &top, (cut.groups - g < 4 ? cut.groups - g : 4) * sizeof(float));
        }
        for (int g = 0; g < cut.groups; g++) {
            const float *scales = tile.scales + g * tile.stride, *minimums = tile.minimums + g * tile.stride;
            vf minimum = load(out[r].minimums + g * W) * all(decays[r]), wanted{};
            vi given{};
            reg whole[4], pairs[2];
            for (int i = 0; i < 4; i++) {
                vf weight = load(x + i * W), scaled = weight * load(scales + i * W);
                whole[i] = _mm512_cvtps_epi32((__m512)(scaled * factors[g] + load(DITHER.at + i * W)));
                wanted += scaled;
                minimum += weight * load(minimums + i * W);
            }
            for (int i = 0; i < 2; i++) {
                pairs[i] = _mm512_packs_epi32(whole[2 * i], whole[2 * i + 1]);
                given = multiply_add(given, pairs[i], _mm512_set1_epi16(1));
            }
            reg* bytes = (reg*)(out[r].pairs + g * TILE / 2);
            const reg low = _mm512_set1_epi16(255);
            bytes[0] = _mm512_packs_epi16(high_bytes(pairs[0]), high_bytes(pairs[1]));
            bytes[1] = _mm512_packus_epi16(pairs[0] & low, pairs[1] & low);
            vf lost = wanted * factors[g] - floats(given);
            store(out[r].minimums + g * W, minimum + lost * (cut.middle * out[r].factors[g]));
        }
    }
}

// Transpose a tile into [chunks, 4, TURNED] registers.
// D390: with VNNI, 4-bit codes times high and low bytes; quads of V's tokens
inline void stage_quads(int32_t* staged, const Tile& tile, const Tile&, const Cut& cut) {
    reg* out = (reg*)staged;
    for (int from = 0; from < cut.row_bytes; from += BYTES, out += 4 * TURNED)
        for (int t = 0; t < TURNED; t++) {
            const uint8_t* const* rows = tile.rows + QUAD * quad_at(t);
            reg a = by_halves(rows[0] + from), b = by_halves(rows[1] + from);
            reg c = by_halves(rows[2] + from), d = by_halves(rows[3] + from);
            reg ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
            out[t] = pairs_low(ab, cd), out[TURNED + t] = pairs_high(ab, cd);
            ab = _mm512_unpackhi_epi8(a, b), cd = _mm512_unpackhi_epi8(c, d);
            out[2 * TURNED + t] = pairs_low(ab, cd), out[3 * TURNED + t] = pairs_high(ab, cd);
        }
}

// out[r] = out[r] * decay[r] + weights[r] . tile for R rows over a staged tile, without the minimums.
template <int R>
inline void quad_values(float* out, int stride, const IntegerWeights* w, const float* decays, const Tile&,
                        const Tile& ahead, const int32_t* staged, const Cut& cut) {
    const reg low_mask = _mm512_set1_epi8(15), high_mask = _mm512_set1_epi8((char)0xf0), *x = (const reg*)staged;
    for (int run = 0; run < cut.runs; run++)
        for (int part = 0; part < 4 * cut.chunks; part++, x += TURNED, out += 2 * W) {
            const int half = cut.is_split ? part / 2 : 0;
            const int groups[2] = {group_of(cut, run, 0, half), group_of(cut, run, 1, half)};
            const int32_t* weights[R][2];
            for (int r = 0; r < R; r++)
                for (int high = 0; high < 2; high++) weights[r][high] = w[r].pairs + groups[high] * TILE / 2;
            const uint8_t* const* next = ahead.rows + part % 4 * TURNED;
            const int from = run * cut.run_bytes + part / 4 * BYTES;
            vi sums[R][2][2] = {};  // of a row, nibble, and byte of a weight
            for (int t = 0; t < TURNED; t++) {
                __builtin_prefetch(next[t] + from);
                reg codes[2] = {x[t] & low_mask, x[t] & high_mask};
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                    for (int high = 0; high < 2; high++)
#pragma GCC unroll 2
                        for (int low = 0; low < 2; low++) {
                            vi& sum = sums[r][high][low];
                            sum = multiply_bytes(sum, codes[high], both(weights[r][high][low * TURNED + t]));
                        }
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                for (int high = 0; high < 2; high++) {
                    float* to = out + (int64_t)r * stride + high * W;
                    vf sum = floats(whole(sums[r][high][0], sums[r][high][1], 4 * high));
                    store(to, load(to) * all(decays[r]) + sum * all(w[r].factors[groups[high]]));
                }
        }
}
#else
inline bool takes_quads(const Cut&) { return false; }
inline void quad_weights(const IntegerWeights*, const float*, const float*, int, const Tile&, const Cut&) {}
inline void stage_quads(int32_t*, const Tile&, const Tile&, const Cut&) {}
template <int R>
inline void quad_values(float*, int, const IntegerWeights*, const float*, const Tile&, const Tile&, const int32_t*,
                        const Cut&) {}
#endif

}  // namespace
#endif
