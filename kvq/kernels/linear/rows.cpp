// Rows of a weight in floats or blocks, looked up in the panels that products read: an embedding that also serves as
// the head.

#include "../native/pool.h"
#include "blocks.h"

namespace {

constexpr int64_t WORTH_THREADS = 1 << 15;  // numbers

// A row is every 16th number of its panel.
template <class T>
inline void read_lane(T* to, const T* from, int n) {
    for (int i = 0; i < n; i++) to[i] = from[(int64_t)i * OUTPUTS];
}

// For bf16, every 16th pair.
inline void read_pairs(uint8_t* out, const uint8_t* from, int n, int code) {
    for (int i = 0; i < n; i += 2, from += OUTPUTS * 4) {
        int count = n - i < 2 ? 1 : 2;
        if (code == KVQ_BF16) {
            memcpy(out + i * 2, from, (size_t)count * 2);
            continue;
        }
        float pair[2] = {from_bf16(load_as<uint16_t>(from)), from_bf16(load_as<uint16_t>(from + 2))};
        write_floats(out + i * bytes_of(code), pair, count, code);
    }
}

// Code number `column` of a chunk, of output `o` of the panel.
inline int code_at(const uint8_t* chunk, CodeKind kind, int o, int column) {
    int word = column / 4, byte = 4 * o + column % 4;
    if (kind == CODES_8) return chunk[64 * word + byte];
    bool pairs = kind == CODES_2 || kind == CODES_3;
    int code = pairs ? chunk[64 * (word / 4) + byte] >> word % 4 * 2 & 3 : chunk[64 * (word / 2) + byte] >> word % 2 * 4 & 15;
    chunk += pairs ? 128 : 256;
    if (kind == CODES_6) code |= (chunk[64 * (word / 4) + byte] >> word % 4 * 2 & 3) << 4;
    if (kind == CODES_3 || kind == CODES_5) code |= (chunk[8 * word + byte / 8] >> byte % 8 & 1) << (pairs ? 2 : 4);
    return code;
}

inline void read_block(float* out, const uint8_t* block, int blocks, int o) {
    const BlockForm& form = FORMS[blocks];
    BlockScales scales = {};
    read_scales(scales, blocks, block);
    int subtracted = is_signed(form.kind) ? 128 : form.offset;
    for (int i = 0; i < form.columns; i++) {
        const uint8_t* chunk = block + form.scale_bytes() + i / CHUNK * form.chunk_bytes();
        int code = code_at(chunk, form.kind, o, i % CHUNK), group = i / form.group;
        if (form.kind == CODES_LISTED) code = listed(blocks)[code];
        out[i] = scales.scale[group].part[o / W][o % W] * (float)(code - subtracted);
        if (form.has_minimum) out[i] += scales.minimum[group].part[o / W][o % W];
    }
}

inline void look_up(const KvqLinear& l, int64_t row, uint8_t* out, int code) {
    constexpr int PIECE = 256;
    if (l.code == KVQ_BLOCKS) {
        const BlockForm& form = FORMS[l.blocks];
        const uint8_t* block = l.codes + row / OUTPUTS * block_panel_bytes(l);
        float values[PIECE];
        for (int first = 0; first < l.in_features; first += form.columns, block += form.bytes()) {
            read_block(values, block, l.blocks, (int)(row % OUTPUTS));
            write_floats(out + (int64_t)first * bytes_of(code), values, form.columns, code);
        }
        return;
    }
    int size = bytes_of(l.code), n = (int)l.in_features;
    const uint8_t* from = l.codes + row / OUTPUTS * l.k * OUTPUTS * size;
    if (l.code == KVQ_BF16) return read_pairs(out, from + row % OUTPUTS * 4, n, code);
    from += row % OUTPUTS * size;
    if (code == l.code) {
        if (size == 4) return read_lane((uint32_t*)out, (const uint32_t*)from, n);
        return read_lane((uint16_t*)out, (const uint16_t*)from, n);
    }
    for (int first = 0; first < n; first += PIECE, from += (int64_t)PIECE * OUTPUTS * size) {
        int count = n - first < PIECE ? n - first : PIECE;
        float values[PIECE];
        if (size == 4) {
            read_lane(values, (const float*)from, count);
        } else {
            uint16_t halves[PIECE];
            read_lane(halves, (const uint16_t*)from, count);
            read_floats(values, (const uint8_t*)halves, count, l.code);
        }
        write_floats(out + (int64_t)first * bytes_of(code), values, count, code);
    }
}

}  // namespace

// `out` [count, in_features] of `code`: the rows of these numbers, of a weight in KVQ_FP32, KVQ_BF16, KVQ_FP16 or
// KVQ_BLOCKS.
KVQ_KERNEL(linear_rows)(const KvqLinear* linear, const int64_t* rows, int64_t count, uint8_t* out, int code, int threads) {
    const KvqLinear& l = *linear;
    for (int64_t i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= l.out_features) return KVQ_BAD_ROW;
    int64_t row_bytes = l.in_features * bytes_of(code);
    if (count * l.in_features < WORTH_THREADS) threads = 1;
    run_even(threads, count, [&](int64_t i) { look_up(l, rows[i], out + i * row_bytes, code); });
    return KVQ_OK;
}
