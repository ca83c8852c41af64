// write_kv on CPUs: see reference.py, whose codes and scales these are, bit for bit.

#include "../native/encode.h"
#include "../native/pool.h"

namespace {

constexpr int64_t WORTH_THREADS = 32768;  // elements

inline bool write_token(const KvqDense& from, const KvqRows& rows, int kv_heads, int block_size, int64_t token,
                        int64_t slot) {
    float x[MOST_DIM];
    bool bad = false;
    for (int head = 0; head < kv_heads; head++) {
        read_floats(x, from.data + token * from.token + head * from.head, rows.dim, from.code);
        bad |= zero_not_finite(x, rows.dim);
        rotate_row(x, rows);
        write_row(x, rows, slot / block_size, head, slot % block_size);
    }
    return bad;
}

}  // namespace

// Slots are checked before anything is written. `bad`: [tokens], set to 1 where a row was not finite.
KVQ_KERNEL(write_kv)(const KvqLayer* layer, const KvqDense* k, const KvqDense* v, const int64_t* slots,
                     int64_t tokens, uint8_t* bad, int threads) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] / layer->block_size >= layer->num_blocks) return KVQ_BAD_BLOCK;
    if (tokens * layer->kv_heads * (layer->k.dim + layer->v.dim) <= WORTH_THREADS) threads = 1;
    run_even(threads, tokens, [=](int64_t t) {
        bool k_bad = write_token(*k, layer->k, layer->kv_heads, layer->block_size, t, slots[t]);
        bool v_bad = write_token(*v, layer->v, layer->kv_heads, layer->block_size, t, slots[t]);
        bad[t] = k_bad | v_bad;
    });
    return KVQ_OK;
}
