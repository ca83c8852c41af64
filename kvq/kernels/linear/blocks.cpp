// Rows times weights in blocks: tiles of few rows and one panel.
//
// As in tiles.h, a row's result has the same bits in every tile. A tile has one of few numbers of rows; rows beyond
// those given give results that nobody reads.

#include "blocks.h"
#include "tiles.h"

namespace {

// One bit of each of a register's codes as `value`: bits lie in the order of the bytes.
inline Codes high_bits(const uint8_t* p, uint8_t value) {
#if defined(__AVX512F__)
    return (Codes)_mm512_maskz_set1_epi8(load_as<uint64_t>(p), (char)value);
#elif defined(__AVX2__)
    const reg places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const reg bits = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    reg x = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(load_as<int32_t>(p)), places), bits);
    return (Codes)_mm256_and_si256(_mm256_cmpeq_epi8(x, bits), _mm256_set1_epi8((char)value));
#else
    Codes x, bit;
    for (int i = 0; i < 4 * W; i++) x[i] = p[i / 8], bit[i] = (uint8_t)(1 << i % 8);
    return (Codes)((x & bit) == bit) & value;
#endif
}

inline Codes listed_codes(Codes x, const uint8_t* list) {
#if defined(__AVX512F__)
    return (Codes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_as<__m128i>(list)), (reg)x);
#elif defined(__AVX2__)
    return (Codes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_as<__m128i>(list)), (reg)x);
#else
    for (int i = 0; i < 4 * W; i++) x[i] = list[x[i]];
    return x;
#endif
}

// Two words of a chunk, four columns of W outputs each, from number 2 * `pair` on, of the outputs from part `part` on.
template <int KIND>
inline __attribute__((always_inline)) void take_pair(Codes out[2], const uint8_t* chunk, int pair, int part, const uint8_t* list) {
    constexpr int LOW = KIND == CODES_2 || KIND == CODES_3 ? 128 : 256;  // bytes of the low bits
    int at = part * W * 4;
    if constexpr (KIND == CODES_8) {
        out[0] = load_as<Codes>(chunk + 128 * pair + at), out[1] = load_as<Codes>(chunk + 128 * pair + 64 + at);
        return;
    }
    if constexpr (KIND == CODES_2 || KIND == CODES_3) {
        Codes x = load_as<Codes>(chunk + 64 * (pair / 2) + at);
        out[0] = (x >> (pair % 2 * 4)) & 3, out[1] = (x >> (pair % 2 * 4 + 2)) & 3;
    } else {
        Codes x = load_as<Codes>(chunk + 64 * pair + at);
        out[0] = x & 15, out[1] = x >> 4;
    }
    if constexpr (KIND == CODES_6) {
        Codes x = load_as<Codes>(chunk + LOW + 64 * (pair / 2) + at);
        if (pair % 2 == 0)
            out[0] |= (x << 4) & 48, out[1] |= (x << 2) & 48;
        else
            out[0] |= x & 48, out[1] |= (x >> 2) & 48;
    }
    if constexpr (KIND == CODES_3 || KIND == CODES_5) {
        const uint8_t* high = chunk + LOW + 16 * pair + part * W / 2;
        constexpr uint8_t VALUE = KIND == CODES_3 ? 4 : 16;
        out[0] |= high_bits(high, VALUE), out[1] |= high_bits(high + 8, VALUE);
    }
    if constexpr (KIND == CODES_LISTED) out[0] = listed_codes(out[0], list), out[1] = listed_codes(out[1], list);
}

template <int KIND, bool HAS_MINIMUM, int R, int PLANES>
void block_tile(const KvqLinear& l, const Tile& tile, int64_t panel, const Output& out, int64_t row) {
    constexpr bool PLAIN = !is_signed((CodeKind)KIND);
    constexpr int GROUP = KIND == CODES_2 || KIND == CODES_3 || KIND == CODES_6 ? 16 : 32, WORDS = GROUP / 4;
    const BlockForm& form = FORMS[l.blocks];
    const uint8_t *block = l.codes + panel * block_panel_bytes(l), *list = listed(l.blocks);
    const int32_t *words = tile.words, *starts = tile.starts;
    const float *steps = tile.steps, *input_sums = tile.sums;
    Floats totals[R] = {};
    BlockScales scales;
    for (int column = 0; column < l.k; column += form.columns) {
        read_scales(scales, l.blocks, block);
        const uint8_t* chunk = block + form.scale_bytes();
        for (int group = 0; group < form.groups(); group++) {
            int first = group * GROUP % CHUNK / 8;  // pair of words
            SegmentSums<PLAIN, R, 1, PLANES> sums;
            sums.start(starts);
            UNROLL for (int pair = 0; pair < WORDS / 2; pair++) {
                Weights even[1][PARTS], odd[1][PARTS];
                UNROLL for (int i = 0; i < PARTS; i++) {
                    Codes x[2];
                    take_pair<KIND>(x, chunk, first + pair, i, list);
                    even[0][i] = ready<PLAIN>(x[0]), odd[0][i] = ready<PLAIN>(x[1]);
                }
                sums.add(even, words, 0);
                sums.add(odd, words + R * PLANES, sums.CHAINS - 1);
                words += 2 * R * PLANES;
            }
            for (int i = 0; i < form.chunk_bytes() * GROUP / CHUNK; i += 64) __builtin_prefetch(chunk + AHEAD + i);
            const Floats &scale = scales.scale[group], &minimum = scales.minimum[group];
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int i = 0; i < PARTS; i++) {
                    vf& total = totals[r].part[i];
                    total = multiply_add(sums.value(0, r, i) * steps[r], scale.part[i], total);
                    if (HAS_MINIMUM) total = multiply_add(minimum.part[i], all(input_sums[r] * steps[r]), total);
                }
            starts += R * PLANES, steps += R, input_sums += R;
            if (group * GROUP % CHUNK + GROUP == CHUNK) chunk += form.chunk_bytes();
        }
        block = chunk;
    }
    for (int r = 0; r < tile.given; r++) write_panel(out, row + r, panel, l.out_features, totals[r]);
}

template <int KIND, bool HAS_MINIMUM, int PLANES>
void block_rows(const KvqLinear& l, const Tile& tile, int64_t panel, const Output& out, int64_t row) {
    switch (tile.rows) {
        case 1: return block_tile<KIND, HAS_MINIMUM, 1, PLANES>(l, tile, panel, out, row);
        case 2: return block_tile<KIND, HAS_MINIMUM, 2, PLANES>(l, tile, panel, out, row);
        case 4: return block_tile<KIND, HAS_MINIMUM, 4, PLANES>(l, tile, panel, out, row);
#if defined(__AVX512F__)
        case 8: return block_tile<KIND, HAS_MINIMUM, 8, PLANES>(l, tile, panel, out, row);
        case 12:
            if constexpr (PLANES == 1) return block_tile<KIND, HAS_MINIMUM, 12, PLANES>(l, tile, panel, out, row);
#endif
    }
}

template <int PLANES>
void block_panel(const KvqLinear& l, const Tile& tile, int64_t panel, const Output& out, int64_t row) {
    bool has_minimum = FORMS[l.blocks].has_minimum;
    switch (FORMS[l.blocks].kind) {
        case CODES_2: return block_rows<CODES_2, true, PLANES>(l, tile, panel, out, row);
        case CODES_3: return block_rows<CODES_3, false, PLANES>(l, tile, panel, out, row);
        case CODES_4:
            if (has_minimum) return block_rows<CODES_4, true, PLANES>(l, tile, panel, out, row);
            return block_rows<CODES_4, false, PLANES>(l, tile, panel, out, row);
        case CODES_5:
            if (has_minimum) return block_rows<CODES_5, true, PLANES>(l, tile, panel, out, row);
            return block_rows<CODES_5, false, PLANES>(l, tile, panel, out, row);
        case CODES_6: return block_rows<CODES_6, false, PLANES>(l, tile, panel, out, row);
        case CODES_8: return block_rows<CODES_8, false, PLANES>(l, tile, panel, out, row);
        case CODES_LISTED: return block_rows<CODES_LISTED, false, PLANES>(l, tile, panel, out, row);
    }
}

}  // namespace

KVQ_KERNEL(block_panels)(const KvqLinear* linear, const void* tile, int64_t panel, int64_t last, const void* out,
                         int64_t row) {
    for (; panel < last; panel++) {
        if (linear->inputs == KVQ_INPUTS_FULL)
            block_panel<2>(*linear, *(const Tile*)tile, panel, *(const Output*)out, row);
        else
            block_panel<1>(*linear, *(const Tile*)tile, panel, *(const Output*)out, row);
    }
    return KVQ_OK;
}
