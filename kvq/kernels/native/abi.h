// What Python hands to the CPU kernels; `structs.py` mirrors it field by field. Plain C types only.
#pragma once

#include <stdint.h>

// Grouped codes of 4 bits are KVQ_INT4, those of any other width KVQ_GROUPED.
enum KvqCode { KVQ_FP32, KVQ_BF16, KVQ_FP16, KVQ_FP8, KVQ_INT8, KVQ_INT4, KVQ_GROUPED };

enum KvqStatus { KVQ_OK, KVQ_NO_MEMORY, KVQ_BAD_BLOCK };

// K or V of one layer in blocks. Strides are bytes, rows themselves contiguous.
struct KvqRows {
    uint8_t* codes;  // [num_blocks, kv_heads, block_size, row bytes]
    int64_t codes_block, codes_head, codes_slot;
    uint8_t* scales;  // fp16 [num_blocks, kv_heads, block_size, scales per row], or null
    int64_t scales_block, scales_head, scales_slot;
    const float* static_scales;  // [kv_heads], or null
    int32_t code;                // KvqCode
    int32_t bits;                // of a code
    int32_t dim;                 // elements of a token row
    int32_t group_size;          // elements that share a scale and a minimum; 0 if not grouped
    int32_t rotated;
    float cut;  // part of a group's range that codes leave out at each end
};

struct KvqLayer {
    KvqRows k, v;
    int64_t num_blocks;
    int32_t kv_heads, block_size;
};

// A dense tensor [tokens, heads, dim] of fp32, bf16 or fp16. Strides are bytes, rows contiguous.
struct KvqDense {
    uint8_t* data;
    int64_t token, head;
    int32_t code;  // KVQ_FP32, KVQ_BF16 or KVQ_FP16
};

struct KvqBatch {
    const int32_t* query_lens;    // [sequences]
    const int32_t* context_lens;  // [sequences]
    const int32_t* tables;        // [sequences, table_width]
    int64_t table_stride;         // entries
    int32_t table_width;
    int32_t sequences;
    int32_t skip_last;  // keys at every sequence's end that are left out
};

// One run of bytes of every block of a pool.
struct KvqRun {
    uint8_t* data;  // of block 0
    int64_t stride, bytes, num_blocks;
};

// The positions [start, end) of several sequences.
struct KvqPositions {
    const int32_t* tables;  // [sequences, table_width]
    int64_t table_stride;   // entries
    int32_t table_width;
    int32_t sequences, start, end, block_size;
};

// A dense tensor [sequences, heads, tokens, dim], as KvqDense otherwise.
struct KvqGathered {
    uint8_t* data;
    int64_t sequence, head, token;
    int32_t code;
};

struct KvqAttention {
    float scale;
    float softcap;       // 0: none
    int32_t window;      // tokens, the query's own included; 0: none
    int32_t q_heads;
    const float* sinks;  // [q_heads], or null
    int32_t threads;
    int32_t exact;  // fp32 arithmetic for every format
};

enum KvqInputs { KVQ_INPUTS_FULL, KVQ_INPUTS_INT8, KVQ_INPUTS_FP8 };

enum KvqActivation { KVQ_SILU, KVQ_GELU_TANH };

// A Linear layer's weight in panels of 16 outputs; kvq/kernels/linear/pack.py makes them.
struct KvqLinear {
    const uint8_t* codes;   // [panels, k, 16] codes or floats, or half as many bytes of nibbles
    const uint8_t* scales;  // [panels, groups, 16] of scale_code; of floats null
    const int8_t* zeros;    // [panels, groups, 16], or null
    const int32_t* order;   // [in_features]: the input that each column multiplies; or null
    int64_t in_features, out_features;
    int32_t k;       // in_features, padded to a multiple of 8
    int32_t groups;  // of k columns
    int32_t code;    // KVQ_FP32, KVQ_BF16, KVQ_FP16, KVQ_FP8, KVQ_INT8 or KVQ_INT4
    int32_t scale_code;
    int32_t inputs;  // KvqInputs
};

// An RMS norm's weight, of `code`; null if there is none.
struct KvqNorm {
    const uint8_t* weight;
    float eps;
    int32_t code;
};

// A decoder layer: norm, queries, keys and values joined, attention, output, norm, gated MLP. Biases are of the
// inputs' code, or null.
struct KvqDecoder {
    KvqNorm input_norm, output_norm;
    KvqNorm q_norm, k_norm;  // of heads; both or none
    const KvqLinear *qkv, *output, *gate_up, *down;
    const uint8_t *qkv_bias, *output_bias;
    int32_t q_heads, kv_heads, dim;  // dim: of a head
    int32_t activation;              // KvqActivation
};
