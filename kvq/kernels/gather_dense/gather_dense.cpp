// gather_dense on CPUs: see reference.py. A task is a few tokens of one KV head of one sequence.

#include "../native/pool.h"
#include "../native/rows.h"

namespace {

constexpr int TOKENS = 64;  // of one task

inline void gather_rows(const KvqRows& rows, const KvqPositions& from, const KvqGathered& out, bool unrotate,
                        int sequence, int head, int begin, int end) {
    float x[MOST_DIM], mean[MOST_DIM];
    Channels channels;
    const int32_t* table = from.tables + sequence * from.table_stride;
    uint8_t* to = out.data + sequence * out.sequence + head * out.head;
    for (int at = begin; at < end; at++) {
        uint8_t* row = to + (at - from.start) * out.token;
        float* y = out.code == KVQ_FP32 ? (float*)row : x;
        int block = table[at / from.block_size], slot = at % from.block_size;
        bool is_new = at == begin || slot == 0;
        if (rows.channels) {
            if (is_new) read_channels(channels, rows, row_scales(rows, block, head, 0));
            read_channel_row(y, row_codes(rows, block, head, slot), channels, rows);
        } else {
            read_row(y, rows, block, head, slot);
        }
        if (rows.means && is_new) read_row(mean, *rows.means, block, head, 0);
        for (int i = 0; rows.means && i < rows.dim; i++) y[i] += mean[i];
        if (unrotate && rows.rotated) rotate(y, rows.dim);
        if (out.code != KVQ_FP32) write_floats(row, x, rows.dim, out.code);
    }
}

inline bool blocks_exist(const KvqLayer& layer, const KvqPositions& from) {
    int first = from.start / from.block_size, last = (from.end + from.block_size - 1) / from.block_size;
    if (from.start < from.end && last > from.table_width) return false;
    for (int s = 0; s < from.sequences; s++)
        for (int i = first; i < last; i++) {
            int32_t block = from.tables[s * from.table_stride + i];
            if (block < 0 || block >= layer.num_blocks) return false;
        }
    return true;
}

}  // namespace

KVQ_KERNEL(gather_dense)(const KvqLayer* layer, const KvqPositions* from, const KvqGathered* k,
                         const KvqGathered* v, int unrotate, int threads) {
    if (from->start >= from->end) return KVQ_OK;
    if (!blocks_exist(*layer, *from)) return KVQ_BAD_BLOCK;
    int64_t parts = (from->end - from->start + TOKENS - 1) / TOKENS;
    int64_t tasks = parts * layer->kv_heads * from->sequences;
    run_even(threads, tasks, [=](int64_t task) {
        int begin = from->start + (int)(task % parts) * TOKENS, end = begin + TOKENS;
        if (end > from->end) end = from->end;
        int head = (int)(task / parts % layer->kv_heads), sequence = (int)(task / parts / layer->kv_heads);
        gather_rows(layer->k, *from, *k, unrotate, sequence, head, begin, end);
        gather_rows(layer->v, *from, *v, unrotate, sequence, head, begin, end);
    });
    return KVQ_OK;
}
