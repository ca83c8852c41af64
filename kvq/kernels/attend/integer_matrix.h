// Scores of many query rows over a tile of integer codes, as a matrix product.
//
// The tile is decoded once and transposed, [pairs of elements, TILE], so that a register contains W keys
// and nothing must be summed across lanes. The integers, and so the scores, are the same as with few rows.
#pragma once

#include "integers.h"
#include "integer_keys.h"

#if defined(KVQ_INTEGER)

namespace {

constexpr int MOST_SEGMENTS = 128;

// Pairs of elements, adjacent in a query row, that belong to one group.
struct Segment {
    int first, count, group;
};

struct Segments {
    int count;
    Segment at[MOST_SEGMENTS];
};

// All pairs of a row without padding, group by group.
inline Segments segments_of(const Cut& cut) {
    Segments s = {};
    for (int group = 0; group < cut.groups; group++)
        for (int chunk = 0; chunk < cut.runs * cut.chunks; chunk++)
            for (int kind = 0; kind < cut.kinds; kind++)
                for (int half = 0; half < (cut.is_split ? 2 : 1); half++) {
                    if (group_of(cut, chunk / cut.chunks, kind / 2, half) != group) continue;
                    int first = (chunk * cut.kinds + kind) * W, bytes = bytes_of(cut, chunk % cut.chunks);
                    int count = cut.is_split ? W / 2 : (bytes + 3) / 4;
                    if (half) first += W / 2;
                    Segment* last = s.at + s.count - 1;
                    if (s.count && last->group == group && last->first + last->count == first)
                        last->count += count;
                    else
                        s.at[s.count++] = {first, count, group};
                }
    return s;
}

// Decode a tile into [width / 2, TILE] pairs.
template <bool NIBBLES>
inline void stage_keys(int32_t* staged, const Tile& tile, const Tile& ahead, const Cut& cut) {
    constexpr int KINDS = NIBBLES ? 4 : 2;
    for (int key = 0; key < TILE; key += W)
        for (int chunk = 0; chunk < cut.runs * cut.chunks; chunk++) {
            int from = chunk / cut.chunks * cut.run_bytes + chunk % cut.chunks * BYTES;
            vi x[KINDS][W];
            for (int j = 0; j < W; j++) {
                reg y = load_bytes_of(tile.rows[key + j] + from, bytes_of(cut, chunk % cut.chunks));
                __builtin_prefetch(ahead.rows[key + j] + from);
                if (NIBBLES) {
                    x[0][j] = (vi)nibbles<0>(y), x[1][j] = (vi)nibbles<8>(y);
                    x[2 % KINDS][j] = (vi)nibbles<4>(y), x[3 % KINDS][j] = (vi)nibbles<12>(y);
                } else {
                    x[0][j] = (vi)even_bytes(y), x[1][j] = (vi)odd_bytes(y);
                }
            }
            for (int kind = 0; kind < KINDS; kind++)
                transpose<W>(staged + (chunk * KINDS + kind) * W * TILE + key, TILE, x[kind]);
        }
}

constexpr int COLUMNS = 4 * W <= TILE && W > 8 ? 4 : 2;  // registers of keys at a time

// Scores of R rows over a staged tile.
template <int R>
inline void matrix_scores(float* scores, const IntegerQuery* q, const int32_t* staged, const Tile& tile,
                          const Segments& segments, bool has_minimum) {
    for (int key = 0; key < TILE; key += COLUMNS * W) {
        for (int s = 0; s < segments.count;) {
            int group = segments.at[s].group;
            vi sums[R][COLUMNS] = {};
            for (; s < segments.count && segments.at[s].group == group; s++)
                for (int p = segments.at[s].first; p < segments.at[s].first + segments.at[s].count; p++) {
                    reg x[COLUMNS];
#pragma GCC unroll 4
                    for (int c = 0; c < COLUMNS; c++) x[c] = load16((const int16_t*)(staged + p * TILE + key + c * W));
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) {
                        reg y = both(((const int32_t*)q[r].q)[p]);
#pragma GCC unroll 4
                        for (int c = 0; c < COLUMNS; c++) sums[r][c] = multiply_add(sums[r][c], x[c], y);
                    }
                }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; c++) {
                    float* to = scores + r * TILE + key + c * W;
                    vf score = group ? load(to) : vf{};
                    add_score(score, sums[r][c], tile, group, key + c * W, has_minimum, q[r].sums[group]);
                    store(to, s < segments.count ? score : score * q[r].factor);
                }
        }
    }
}

}  // namespace
#endif
