// Integer codes as 16-bit numbers for multiply-adds: how token rows are split into registers.
//
// A row is bytes (INT8; grouped codes of 5 bits and more) or nibbles (INT4 and narrower codes); codes in
// planes are first converted to one of these (planes.h). Its bytes are split into runs: the whole row, or one
// group's share (of a half, if they are nibbles). A run is split into
// chunks of one register, the last one padded with zeros. A 16-bit lane then contains two bytes, an even
// and an odd one, so shifts and masks alone yield 16-bit numbers, without shuffles: two registers of them
// for bytes (even, then odd), four for nibbles (low nibbles of even and odd bytes, then high nibbles).
// Queries are stored in the resulting order of elements.
#pragma once

#include "planes.h"
#include "task.h"

#if defined(__AVX2__)
#define KVQ_INTEGER 1

namespace {

constexpr int L = 2 * W;      // 16-bit numbers in a register
constexpr int BYTES = 4 * W;  // of a register
constexpr int MOST_GROUPS = 16;
constexpr int MOST_INTEGER_DIM = 512;  // 127 * 32767 * 512 < 2^31: sums can't overflow
constexpr float MOST = 32767.0f;
constexpr float MOST_SPLIT = 32639.0f;  // 127 * 257: the largest number whose high byte does not overflow

inline reg both(int32_t pair) { return KVQ_MM(set1_epi32)(pair); }
inline reg load16(const int16_t* p) { return load_as<reg>(p); }
inline reg pairs_low(reg a, reg b) { return KVQ_MM(unpacklo_epi16)(a, b); }
inline reg pairs_high(reg a, reg b) { return KVQ_MM(unpackhi_epi16)(a, b); }
inline reg even_bytes(reg x) { return KVQ_MM(srai_epi16)(KVQ_MM(slli_epi16)(x, 8), 8); }
inline reg odd_bytes(reg x) { return KVQ_MM(srai_epi16)(x, 8); }
template <int SHIFT>
inline reg nibbles(reg x) {
    reg y = SHIFT ? KVQ_MM(srli_epi16)(x, SHIFT) : x;
    return SHIFT == 12 ? y : y & KVQ_MM(set1_epi16)(15);
}
// Sums stay in registers here: compilers would reorder a loop's additions, and run out of registers.
inline void keep(vi& sum) { asm("" : "+v"(sum)); }
// D92: 16-bit multiply-adds, rows read in place
inline vi multiply_add(vi sum, reg a, reg b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((reg)sum, a, b);
#else
    return sum + (vi)KVQ_MM(madd_epi16)(a, b);
#endif
}

#if defined(__AVX512VNNI__)
// An integer of 15 bits and sign is 256 * high + low, with signs: codes are multiplied by both bytes, four at a time.
inline reg high_bytes(reg x) { return _mm512_srai_epi16(_mm512_add_epi16(x, _mm512_set1_epi16(128)), 8); }
inline vi multiply_bytes(vi sum, reg codes, reg parts) { return (vi)_mm512_dpbusd_epi32((reg)sum, codes, parts); }
// The sum of products with codes that were left `shift` bits high, from those with high and with low bytes.
inline vi whole(vi high, vi low, int shift) { return (high << (8 - shift)) + (low >> shift); }
#endif

#if defined(__AVX512F__)
// Load the first `n` bytes at `p`, then zeros; n >= 1.
inline reg load_bytes_of(const uint8_t* p, int n) {
    return _mm512_maskz_loadu_epi8(n >= 64 ? ~0ull : (1ull << n) - 1, p);
}
inline reg load_two(const uint8_t* a, const uint8_t* b) {  // half a register of each
    reg low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)a));
    return _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i*)b), 1);
}
inline reg both_halves(int32_t low, int32_t high) {
    return _mm512_mask_set1_epi32(_mm512_set1_epi32(low), 0xff00, high);
}
inline vi folded(vi x) { return x + (vi)_mm512_shuffle_i64x2((reg)x, (reg)x, 0x4e); }  // halves added
inline vf rounded(vf x) { return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline reg rounded_pairs(vf a, vf b) {  // 2 W numbers to nearest, as 16 bits each
    reg low = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)a)));
    return _mm512_inserti64x4(low, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)b)), 1);
}
#else
inline reg load_bytes_of(const uint8_t* p, int n) {
    if (n >= BYTES) return _mm256_loadu_si256((const __m256i*)p);
    uint8_t last[BYTES] = {};
    memcpy(last, p, n);
    return _mm256_loadu_si256((const __m256i*)last);
}
inline reg load_two(const uint8_t* a, const uint8_t* b) {
    return _mm256_set_m128i(_mm_loadu_si128((const __m128i*)b), _mm_loadu_si128((const __m128i*)a));
}
inline reg both_halves(int32_t low, int32_t high) {
    return _mm256_blend_epi32(_mm256_set1_epi32(low), _mm256_set1_epi32(high), 0xf0);
}
inline vi folded(vi x) { return x + (vi)_mm256_permute2x128_si256((reg)x, (reg)x, 1); }
inline vf rounded(vf x) { return (vf)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline reg rounded_pairs(vf a, vf b) {
    reg x = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)a), _mm256_cvtps_epi32((__m256)b));
    return _mm256_permute4x64_epi64(x, 0xd8);
}
#endif

// Layout of the rows of K or V in registers.
struct Cut {
    bool is_nibbles;
    bool is_grouped;  // codes are unsigned, and have minimums
    bool is_pair;   // a chunk is half a register: two tokens share one
    bool is_split;  // a chunk is two runs of half a register each
    int row_bytes;
    int groups;     // that have a scale (and a minimum) each; with one, every run shares it
    int runs;       // of a row, if not split; then chunks
    int run_bytes;
    int chunks;     // of a run
    int kinds;      // registers of 16-bit numbers that a chunk becomes
    int width;      // 16-bit numbers of a row, padding included
    float middle;   // of the codes' range
    float most;     // largest integer of a query's elements
};

inline Cut cut_of(const KvqRows& rows) {
    Cut c = {};
    c.is_grouped = rows.code != KVQ_INT8;
    c.is_nibbles = c.is_grouped && rows.bits <= 4;
    c.middle = c.is_grouped ? ((1 << rows.bits) - 1) / 2.0f : 0.0f;
    int bytes = c.row_bytes = c.is_nibbles ? rows.dim / 2 : rows.dim;
    c.groups = c.is_grouped ? rows.dim / rows.group_size : 1;
    c.run_bytes = c.groups > 1 ? rows.group_size : bytes;
    if (c.groups > 1 && c.run_bytes == BYTES / 2 && bytes % BYTES == 0) {
        c.is_split = true;
        c.run_bytes = BYTES;
    }
    c.runs = bytes / c.run_bytes;
    c.is_pair = bytes == BYTES / 2 && c.run_bytes == bytes;
    c.chunks = (c.run_bytes + BYTES - 1) / BYTES;
    c.kinds = c.is_nibbles ? 4 : 2;
    c.width = c.runs * c.chunks * c.kinds * L;
#if defined(__AVX512VNNI__)
    c.most = c.is_nibbles ? MOST_SPLIT : MOST;
#else
    c.most = MOST;
#endif
    return c;
}

inline bool takes_integers(const KvqRows& rows) {
    if (rows.dim > MOST_INTEGER_DIM || rows.channels) return false;
    if (rows.code == KVQ_INT8) return true;
    if (rows.code != KVQ_INT4 && (rows.code != KVQ_GROUPED || rows.bits > 6)) return false;
    return rows.dim % 2 == 0 && rows.dim / rows.group_size <= MOST_GROUPS;
}

// Bytes of a chunk.
inline int bytes_of(const Cut& c, int chunk) {
    int left = c.run_bytes - chunk * BYTES;
    return left < BYTES ? left : BYTES;
}

// The group of a chunk's low (0) or high (1) nibbles; of a split chunk's `half`.
inline int group_of(const Cut& c, int run, int high, int half) {
    if (c.groups == 1) return 0;
    return (high ? c.groups / 2 : 0) + (c.is_split ? 2 * run + half : run);
}

// Place of a row's element: its chunk, the byte in it, and the register for that byte.
struct Place {
    int chunk, byte, kind;
};

inline Place place_of(const Cut& c, int dim, int element) {
    int high = c.is_nibbles && element >= dim / 2, byte = high ? element - dim / 2 : element;
    int run = byte / c.run_bytes, within = byte % c.run_bytes;
    return {run * c.chunks + within / BYTES, within % BYTES, 2 * high + within % 2};
}

// Index of an element among a query's 16-bit numbers.
inline int key_index(const Cut& c, int dim, int element) {
    Place p = place_of(c, dim, element);
    return (p.chunk * c.kinds + p.kind) * L + p.byte / 2;
}

// Index of an element among an output row's floats, which pairing tokens has shuffled.
inline int value_index(const Cut& c, int dim, int element) {
    Place p = place_of(c, dim, element);
    int word = p.byte / 2, in_lane = word % 8;
    return ((p.chunk * 2 + in_lane / 4) * c.kinds + p.kind) * W + word / 8 * 4 + in_lane % 4;
}

// A tile's rows of K or V. Tokens that must not be read have the address of one that is read, and zeros.
struct Tile {
    const uint8_t* rows[TILE];
    int keys;         // keys from here on are not read
    float* scales;    // of group g at g * stride, [TILE]
    float* minimums;  // likewise, of grouped codes
    int stride;
};

constexpr int even(int i) { return 2 * i; }
constexpr int odd(int i) { return 2 * i + 1; }

// Store the N registers `x` as [W, N] numbers; column i goes to out + i * stride.
template <int N, int FIRST = 0, int STEP = 1, class V, class T>
inline void transpose(T* out, int stride, const V* x) {
    if constexpr (N == 1) {
        memcpy(out + FIRST * stride, x, sizeof *x);
    } else {
        V evens[N / 2], odds[N / 2];
        for (int i = 0; i < N / 2; i++) {
            evens[i] = KVQ_PICKED(x[2 * i], x[2 * i + 1], even);
            odds[i] = KVQ_PICKED(x[2 * i], x[2 * i + 1], odd);
        }
        transpose<N / 2, FIRST, 2 * STEP>(out, stride, evens);
        transpose<N / 2, FIRST + STEP, 2 * STEP>(out, stride, odds);
    }
}

}  // namespace
#endif
