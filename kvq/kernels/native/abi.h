// Interface between Python and the CPU kernels: `abi.py` reads numbers, structures and kernels from this text, so
// that nothing is declared twice. Plain C types only.
#pragma once

#include <stdint.h>

// Name of a kernel in its variant.
#define KVQ_NAME_(variant, name) kvq_##variant##_##name
#define KVQ_NAME(variant, name) KVQ_NAME_(variant, name)
#define KVQ_CALL(name) KVQ_NAME(KVQ_VARIANT, name)
#define KVQ_KERNEL(name) extern "C" int KVQ_CALL(name)

// Grouped codes of 4 bits are KVQ_INT4, those of any other width KVQ_GROUPED.
enum KvqCode { KVQ_FP32, KVQ_BF16, KVQ_FP16, KVQ_FP8, KVQ_INT8, KVQ_INT4, KVQ_GROUPED, KVQ_BLOCKS };

enum KvqStatus { KVQ_OK, KVQ_NO_MEMORY, KVQ_BAD_BLOCK, KVQ_BAD_EXPERT, KVQ_BAD_ROW };

// K or V of one layer in blocks. Strides are bytes, rows themselves contiguous.
struct KvqRows {
    uint8_t* codes;  // [num_blocks, kv_heads, block_size, row bytes]
    int64_t codes_block, codes_head, codes_slot;
    uint8_t* scales;  // fp16, or bytes if narrow: [num_blocks, kv_heads, block_size, scales per row]; or null
    int64_t scales_block, scales_head, scales_slot;
    const float* static_scales;  // [kv_heads], or null
    int32_t code;                // KvqCode
    int32_t bits;                // of a code
    int32_t dim;                 // elements of a token row
    int32_t group_size;          // elements that share a scale and a minimum; 0 if not grouped
    int32_t rotated;
    float cut;       // part of a group's range that codes leave out at each end
    int32_t narrow;  // a group's scale and minimum are a byte each; see codec/narrow.py
    int32_t channels;  // scales are per block and channel; see codec/channel.py
    const KvqRows* means;  // block means, each as the only row of its block; or null
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

// A dense tensor [sequences, heads, tokens, dim], otherwise like KvqDense.
struct KvqGathered {
    uint8_t* data;
    int64_t sequence, head, token;
    int32_t code;
};

// The part of the keys that an attention reads, if others are stored elsewhere: see attend/options.py.
enum KvqPart { KVQ_ALL, KVQ_OLD, KVQ_YOUNG };

struct KvqAttention {
    float scale;
    float softcap;       // 0: none
    int32_t window;      // tokens, the query's own included; 0: none
    int32_t chunk;       // tokens; keys outside the query's own chunk are hidden; 0: none
    int32_t q_heads;
    const float* sinks;  // [q_heads], or null
    int32_t threads;
    int32_t exact;  // fp32 arithmetic for every format
    int32_t part;   // KvqPart
    int32_t recent, edge_size, first, last;  // tokens; of a part, whose blocks have edge_size
};

enum KvqInputs { KVQ_INPUTS_FULL, KVQ_INPUTS_INT8, KVQ_INPUTS_FP8, KVQ_INPUTS_GROUPS };

// Types of weights in blocks, as in GGUF files: blocks.h.
enum KvqBlocks {
    KVQ_Q4_0,
    KVQ_Q4_1,
    KVQ_Q5_0,
    KVQ_Q5_1,
    KVQ_Q8_0,
    KVQ_Q2_K,
    KVQ_Q3_K,
    KVQ_Q4_K,
    KVQ_Q5_K,
    KVQ_Q6_K,
    KVQ_IQ4_NL,
    KVQ_MXFP4
};

// Products of bf16 rows with bf16 weights: in fp32, or by the CPU's instructions for pairs or tiles. If there are
// tiles, all other products with float weights are split into bf16 products, and with codes, many rows use bytes.
enum KvqProducts {
    KVQ_PRODUCTS_FP32,
    KVQ_PRODUCTS_PAIRS,
    KVQ_PRODUCTS_TILES,
    KVQ_PRODUCTS_SPLIT,
    KVQ_PRODUCTS_BYTES
};

enum KvqActivation { KVQ_SILU, KVQ_GELU_TANH };

// A Linear layer's weight in panels of 16 outputs; kvq/kernels/linear/pack.py makes them.
struct KvqLinear {
    const uint8_t* codes;   // [panels, k, 16] codes or floats, bf16 [panels, k / 2, 16, 2]; nibbles in half the bytes
    const uint8_t* scales;  // [panels, groups, 16] of scale_code; null for floats
    const int8_t* zeros;    // [panels, groups, 16], or null
    const int32_t* order;   // [in_features]: the input that each column multiplies; or null
    int64_t in_features, out_features;  // those of `next` included
    int32_t k;       // in_features, padded to a multiple of 8, or of 32 for bf16
    int32_t groups;  // of k columns
    int32_t code;    // KVQ_FP32, KVQ_BF16, KVQ_FP16, KVQ_FP8, KVQ_INT8, KVQ_INT4 or KVQ_BLOCKS
    int32_t scale_code;
    int32_t inputs;  // KvqInputs
    int32_t products;  // KvqProducts
    int32_t blocks;    // KvqBlocks of KVQ_BLOCKS, whose panels contain their scales
    const KvqLinear* next;  // the weight of the outputs after these, for the same inputs; or null
};

// Gated MLPs among which rows choose: down(activation(gates) * rest), with gates and rest from gate_up.
struct KvqExperts {
    const KvqLinear* gate_up;   // [experts]: [hidden] -> gates, then as many others
    const KvqLinear* down;      // [experts]: their number -> [hidden]
    const float* gate_up_bias;  // [experts, outputs of gate_up], or null
    const float* down_bias;     // [experts, hidden], or null
    int32_t experts;
    int32_t activation;  // KvqActivation
    float slope;         // of SiLU's logistic function
    float limit;         // gates are clamped to at most `limit`, the rest to [-limit, limit]; infinity: none
    float shift;         // added to the rest
};

// A stored matrix: rows are contiguous, and `row` bytes apart. `mapped`: 1 if they are pages of a file that nobody
// writes to, which may be dropped from memory and read again.
struct KvqMatrix {
    const uint8_t* data;
    int64_t rows, row, mapped;
};

// An RMS norm's weight, of `code`; null if there is none.
struct KvqNorm {
    const uint8_t* weight;
    float eps;
    int32_t code;
};

// Operations around a product, row by row while rows are in the cache. Inputs are normalized, or are gates and gated
// values, [rows, 2 in_features]. A bias is added to results, then numbers for every row, both of the rows' code.
struct KvqAround {
    const KvqNorm* norm;   // or null
    int32_t gated;
    int32_t activation;    // KvqActivation, of gates
    const uint8_t* bias;   // [out_features], or null
    const uint8_t* added;  // [rows, out_features], or null
    int64_t added_row;     // bytes
};

// A decoder layer: norm, queries, keys and values joined, attention, output, norm, gated MLP. Biases are of the
// inputs' code, or null.
struct KvqDecoder {
    KvqNorm input_norm, mlp_norm;
    KvqNorm attention_norm, out_norm;  // of the outputs of attention and MLP; each may be none
    KvqNorm q_norm, k_norm;  // of heads; both or none
    const KvqLinear *qkv, *output, *gate_up, *down;
    const uint8_t *qkv_bias, *output_bias;
    int32_t q_heads, kv_heads, dim;  // dim: of a head
    int32_t activation;              // KvqActivation
};

// Low-rank factors of one weight, which add scale (x A^T) B^T to some outputs of a product: kvq/kernels/adapters.
struct KvqFactors {
    const uint8_t *a, *b;  // [rank, k], and panels of 16 outputs [panels, rank, 16]; both of `code`
    int64_t in_features, first, out_features;  // outputs [first, first + out_features) of the product's
    int32_t rank;  // padded to a multiple of 4; k is in_features padded to one of 16
    int32_t code;  // KVQ_FP32, KVQ_BF16 or KVQ_FP16
    float scale;
    const KvqFactors* next;  // of another weight of the same product, or null
};

// The factors of a row's adapter, or null.
struct KvqChosen {
    const KvqFactors* factors;
};

// An adapter's factors for the products of a decoder layer; each may be null.
struct KvqLayerFactors {
    const KvqFactors *qkv, *output, *gate_up, *down;
};

struct KvqAdapter {
    const KvqLayerFactors* layers;  // [layers]
};

// The adapters of a step, and the index of each row's, or -1.
struct KvqAdapters {
    const KvqAdapter* adapters;
    const int32_t* chosen;  // [rows]
    const int32_t* wanted;  // [num_wanted], of the rows whose logits are
};

// One of a step's decoder layers, over its own blocks. A staged layer stores new tokens in `recent`; see
// kvq/cache/stores/staged.py.
struct KvqStackLayer {
    const KvqDecoder* decoder;
    const KvqLayer* kv;
    const KvqLayer *recent, *sinks;  // or null
    KvqAttention attention;          // of a staged layer, all of OLD except `last`
    int32_t group, angles;           // indices of the step's tables, and of its angles
    int32_t recent_group, sinks_group;
    int32_t sees_old;  // 0: a window ends within the recent tokens
};

// Data that the layers of a step share, and buffers between operations.
struct KvqStackStep {
    const KvqBatch* batches;      // [groups]
    const int64_t** slots;        // [groups][rows]
    const int64_t** moves;        // [groups][count, 3] for the groups of staged layers: see seal.cpp
    const int64_t* num_moves;     // [groups]
    float *parts, *part_lse;      // [3, rows, q_heads dim] and [3, rows, q_heads] for staged layers; or null
    const uint8_t **cos, **sin;   // [kinds of angles][rows, dim]
    uint8_t* heads;               // [rows, queries, keys and values]
    uint8_t* attended;            // [rows, q_heads dim]
    float* lse;                   // [rows, q_heads]
    uint8_t* bad;                 // [rows]
    const KvqAdapters* adapters;  // or null
};

// Parts around a model's layers, and a step's numbers and buffers.
struct KvqPass {
    const uint8_t* embedding;        // [vocab, hidden] of the step's type, or null:
    const KvqLinear* looked_up;      // the head's own weight, in which rows are looked up
    int64_t vocab;
    float scale;                     // of embeddings
    KvqNorm norm;
    const KvqLinear* head;
    const uint8_t **cos, **sin;      // of every kind of angles [positions, dim]
    int64_t num_positions;
    int32_t kinds, dim;
    const int64_t *tokens, *positions;  // [rows]
    const int64_t* wanted;           // [num_wanted] rows whose logits are
    int64_t num_wanted;
    uint8_t *x, *out;                // [rows, hidden]
    uint8_t* angles;                 // [kinds, 2, rows, dim]
    int32_t* lens;                   // [rows]
};

// A whole step: `logits` [wanted, vocab] of `code` from token ids and positions. Tokens whose keys or values were not
// finite are flagged in `bad` [rows]. The time in write_kv and attend is added to `seconds`; `took`: the total time.
struct KvqWholeStep {
    const KvqStackLayer* layers;
    const KvqStackStep* step;
    const KvqPass* pass;
    uint8_t *logits, *bad;
    int64_t rows, number;  // number: of the running pass, if it was begun; or 0
    double seconds, took;
    int32_t count, code, threads, status;
};

// The kernels, each of which returns a KvqStatus; their arguments are documented where they are defined.
KVQ_KERNEL(write_kv)(const KvqLayer* layer, const KvqDense* k, const KvqDense* v, const int64_t* slots,
                     int64_t tokens, uint8_t* bad, int threads);
KVQ_KERNEL(attend)(const KvqLayer* layer, const KvqDense* q, const KvqDense* out, float* lse,
                   const KvqBatch* batch, const KvqAttention* options);
KVQ_KERNEL(attend_latent)(const KvqLayer* layer, const KvqDense* q, const KvqDense* out, float* lse,
                          const KvqBatch* batch, const KvqAttention* options);
KVQ_KERNEL(latent_tiles)(int* found);
KVQ_KERNEL(gather_dense)(const KvqLayer* layer, const KvqPositions* from, const KvqGathered* k,
                         const KvqGathered* v, int unrotate, int threads);
KVQ_KERNEL(merge_partials)(const float* outs, const float* lses, const float* sinks, uint8_t* out, float* lse,
                           int code, int parts, int64_t rows, int heads, int dim, int threads);
KVQ_KERNEL(copy_blocks)(const KvqRun* runs, int64_t num_runs, const int64_t* pairs, int64_t count, int threads);
KVQ_KERNEL(seal)(const KvqLayer* recent, const KvqLayer* sealed, const KvqLayer* sinks, const int64_t* moves,
                 int64_t count, int threads);
KVQ_KERNEL(linear)(const KvqLinear* linear, const uint8_t* x, int64_t x_row, uint8_t* out, int64_t out_row,
                   int code, int64_t rows, int threads);
KVQ_KERNEL(linear_around)(const KvqLinear* linear, const KvqAround* around, const uint8_t* x, int64_t x_row,
                          uint8_t* out, int64_t out_row, int code, int64_t rows, int threads);
KVQ_KERNEL(linear_each)(const KvqLinear* linears, int count, const uint8_t* x, int64_t x_row, int64_t x_each,
                        uint8_t* out, int64_t out_row, int64_t out_each, int code, int64_t rows, int threads);
KVQ_KERNEL(linear_products)(int* best);
KVQ_KERNEL(linear_rows)(const KvqLinear* linear, const int64_t* rows, int64_t count, uint8_t* out, int code, int threads);
KVQ_KERNEL(gated)(const uint8_t* x, int64_t x_row, uint8_t* out, int64_t out_row, int64_t n, int code,
                  int activation, int64_t rows, int threads);
KVQ_KERNEL(linear_mlp)(const KvqLinear* gate_up, const KvqLinear* down, const uint8_t* x, int64_t x_row,
                       uint8_t* out, int64_t out_row, int code, int activation, int64_t rows, int threads);
KVQ_KERNEL(experts)(const KvqExperts* experts, const uint8_t* x, int64_t x_row, const int64_t* chosen,
                    const float* weights, int top, uint8_t* out, int64_t out_row, int code, int64_t rows,
                    int threads);
KVQ_KERNEL(pack_blocks)(const KvqMatrix* parts, int count, int64_t columns, int blocks, uint8_t* panels, int threads);
KVQ_KERNEL(pack_plain)(const KvqMatrix* parts, int count, int64_t columns, int code, uint8_t* panels, int64_t k,
                       int threads);
KVQ_KERNEL(rms_norm)(const uint8_t* x, const uint8_t* weight, uint8_t* out, int64_t dim, int code,
                     int weight_code, float eps, int64_t rows, int threads);
KVQ_KERNEL(rope)(uint8_t* x, int64_t x_row, const uint8_t* cos, const uint8_t* sin, int heads, int half,
                 int code, int64_t rows, int threads);
KVQ_KERNEL(adapters)(const KvqChosen* chosen, const KvqAround* around, const uint8_t* x, int64_t x_row, uint8_t* out,
                     int64_t out_row, int code, int64_t rows, int threads);
KVQ_KERNEL(decoder_in)(const KvqDecoder* layer, const KvqAdapters* adapters, int index, const uint8_t* x,
                       const uint8_t* cos, const uint8_t* sin, uint8_t* out, int code, int64_t rows, int threads);
KVQ_KERNEL(decoder_out)(const KvqDecoder* layer, const KvqAdapters* adapters, int index, const uint8_t* x,
                        const uint8_t* attended, uint8_t* out, int code, int64_t rows, int threads);
KVQ_KERNEL(decoder_stack)(const KvqStackLayer* layers, int count, const KvqStackStep* step, const uint8_t* x,
                          uint8_t* out, uint8_t* bad, double* seconds, int code, int64_t rows, int threads);
KVQ_KERNEL(decoder_pass)(KvqWholeStep* step);
KVQ_KERNEL(decoder_pass_begin)(KvqWholeStep* step);
KVQ_KERNEL(decoder_pass_end)(KvqWholeStep* step);
