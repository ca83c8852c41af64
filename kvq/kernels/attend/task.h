// Units of work of attention: one KV head of one sequence at a time, tile after tile of keys.
#pragma once

#include "../native/rows.h"

namespace {

constexpr int ROWS = 64;     // query rows of a task: (new token, query head of the KV head)
constexpr int TILE = 64;     // keys taken at a time
constexpr int SPLIT = 1024;  // keys of one part of a context; a multiple of TILE

// Query rows [row, row + rows) of one KV head of one sequence.
struct Task {
    int sequence, head, row, rows;
    int64_t token;    // index of the sequence's first new token
    int start;        // its position
    int first, last;  // splits
    int64_t partial;  // start of the splits' partial results, or -1 to merge at once
};

// Softmax of some query rows over some keys, not yet divided by `total`.
struct Partial {
    float* top;    // [rows] largest score, -inf if no key was seen
    float* total;  // [rows] sum of exp(score - top)
    float* out;    // [rows, v width]
};

inline float minus_infinity() { return -__builtin_inff(); }

// Iterator over a sequence's slots; divides only once.
struct Cursor {
    const int32_t* entry;
    int offset, size;

    Cursor(const KvqLayer& layer, const KvqBatch& batch, int sequence, int key) {
        size = layer.block_size;
        entry = batch.tables + sequence * batch.table_stride + key / size;
        offset = key % size;
    }

    // Over blocks of one slot each.
    Cursor(const KvqBatch& batch, int sequence, int block)
        : entry(batch.tables + sequence * batch.table_stride + block), offset(0), size(1) {}

    // Slots up to the block's end, at most `left`.
    int run(int left) const { return size - offset < left ? size - offset : left; }

    void skip(int slots) {  // not past the block's end
        offset += slots;
        if (offset == size) offset = 0, entry++;
    }
};

}  // namespace
