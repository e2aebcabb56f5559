// The C interface of the native kernels. Python loads it with ctypes (../library.py).
//
// Activations are float32. Tensors are row-major with unit stride in the last dimension; where a row stride is given it
// counts elements. Nothing here allocates for the caller, throws or checks sizes: the Python side has done so.
#pragma once

#include <stdint.h>

#include "shm_allreduce.h"

#ifdef __cplusplus
extern "C" {
#endif

enum wr_format {
    WR_F32 = 0,
    WR_F16 = 1,
    WR_BF16 = 2,
    WR_Q8 = 3,  // 8 bits, groups of 32 along in_features, a float16 scale (and offset) per group
    WR_Q4 = 4,  // 4 bits, the same
    // KV pages (kv_quantised.h)
    WR_KV_INT8 = 5,  // keys and values in 8 bits
    WR_KV_INT4 = 6,  // in 4 bits
    WR_KV_K8V4 = 7,  // keys in 8, values in 4
};

// What the groups of a quantised weight have besides their scale: w = scale * (code - 2^(bits - 1)) without,
// scale * code + minimum, or scale * (code - zero).
enum wr_offsets { WR_NO_OFFSETS = 0, WR_MINIMA = 1, WR_ZEROS = 2 };

enum wr_activation { WR_SILU = 0, WR_GELU_TANH = 1 };

// ---- cpu.cpp --------------------------------------------------------------------------------------------------------

// The library that suits this machine best: avx512, avx2 or generic.
const char *wr_best_instructions(void);

// ---- pool.cpp -------------------------------------------------------------------------------------------------------

// Threads that take part in a kernel, the caller included.
int32_t wr_num_threads(void);
void wr_set_num_threads(int32_t num_threads);

// ---- linear_*.cpp ---------------------------------------------------------------------------------------------------

// A weight [out_features, in_features] in panels of 16 output features (see linear_pack.cpp).
typedef struct wr_weights {
    int32_t format;   // wr_format
    int32_t offsets;  // quantised formats: wr_offsets
    int64_t out_features;
    int64_t in_features;  // columns
    const void *data;     // packed, aligned to 64 bytes
    const float *bias;    // [out_features] or NULL
    const int32_t *order;  // quantised formats: [in_features] which value of x each column takes, -1: 0. NULL: in order
} wr_weights;

// Bytes that a packed weight takes.
int64_t wr_packed_bytes(int32_t format, int32_t offsets, int64_t out_features, int64_t in_features);

// Pack a float32 weight: rounded to the format, or quantised, 4 bits with zeros and 8 bits without. `group` input
// features, a multiple of 32, get one scale; the last ones may be fewer. What is packed into is zeros before.
void wr_pack(const float *weight, int32_t format, int64_t group, int64_t out_features, int64_t in_features,
             void *packed);

// Pack codes [out_features, in_features] of quantised formats as they are, with float16 scales [out_features,
// in_features / 32] and zeros of that shape, or NULL where all are 2^(bits - 1).
void wr_pack_codes(const uint8_t *codes, const uint16_t *scales, const uint8_t *zeros, int32_t format,
                   int64_t out_features, int64_t in_features, void *packed);

// Repack GGUF blocks (ggml type 2 Q4_0, 3 Q4_1, 8 Q8_0, 12 Q4_K) without requantising. Returns 0, or -1 for other types.
int32_t wr_pack_gguf(const void *blocks, int32_t ggml_type, int64_t out_features, int64_t in_features, void *packed);

// The values of a packed weight as float32 [out_features, in_features].
void wr_unpack(const wr_weights *weights, float *out);

// y[rows, sum of out_features] (+)= x[rows, in_features] * W^T + bias. The parts stand side by side in y and read one x.
// Quantised weights quantise x per row and group of 32.
void wr_linear(const wr_weights *parts, int32_t num_parts, const float *x, int64_t x_stride, float *y, int64_t y_stride,
               int64_t rows, int32_t accumulate);

// ---- rms_norm.cpp, gated.cpp, rotary.cpp ----------------------------------------------------------------------------

// out[rows, size] (+)= x / sqrt(mean(x^2) + eps) * weight. out may be x if accumulate is 0.
void wr_rms_norm(const float *x, int64_t x_stride, const float *weight, float eps, float *out, int64_t out_stride,
                 int64_t rows, int64_t size, int32_t accumulate);

// out[rows, inner] = activation(gate) * up, of gate_up [rows, 2 * inner] with the gate first.
void wr_gated(const float *gate_up, int64_t stride, int64_t rows, int64_t inner, int32_t activation, float *out,
              int64_t out_stride);

// Queries and keys of qkv [rows, (num_heads + 2 * num_kv_heads) * head_dim], in place: norms of single heads first
// (weights [head_dim] or NULL), then the half-split rotation of the first rotary_dim elements of each head by
// cos and sin [rows, rotary_dim / 2].
void wr_rotary(float *qkv, int64_t stride, int64_t rows, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim,
               const float *q_norm, const float *k_norm, float eps, const float *cos, const float *sin,
               int32_t rotary_dim);

// ---- by_head.cpp ----------------------------------------------------------------------------------------------------

// out[rows, heads, outer] = x[rows, heads, inner] * weights[heads, inner, outer], each head by its own matrix. Rows and
// heads of x lie x_stride and x_head_stride apart.
void wr_by_head(const float *x, int64_t x_stride, int64_t x_head_stride, const float *weights, float *out, int64_t rows,
                int32_t heads, int32_t inner, int32_t outer);

// ---- kv_append.cpp, kv_append_quantised.cpp, kv_move.cpp, paged_attention.cpp ---------------------------------------

// One layer's pages. Keys lie transposed within a page: one row of page positions per dimension, so that the scores of
// a page's keys are sums of whole vectors.
typedef struct wr_kv_cache {
    void *keys;    // [num_blocks, num_kv_heads, head_dim, block_size]; NULL: the values are the keys too (latents)
    void *values;  // [num_blocks, num_kv_heads, block_size, head_dim]
    int32_t format;  // WR_F32, WR_F16, WR_BF16 or WR_KV_*; the pages of the latter are bytes (kv_quantised.h)
    int32_t block_size;
    int32_t num_kv_heads;
    int32_t head_dim;
    void *open_keys;            // quantised: float16 keys of blocks that tokens join, pages as those of `keys` above
    const int32_t *open_pages;  // [num_blocks] the page there of each block; -1: none. A step's own blocks have one
} wr_kv_cache;

// Store keys and values [rows, num_kv_heads * head_dim] at slots [rows] = block * block_size + offset.
void wr_kv_append(const float *keys, const float *values, int64_t stride, int64_t rows, const wr_kv_cache *cache,
                  const int64_t *slots);

// Move tokens from slots to slots [count], one after the other, in caches [num_caches] that are not quantised.
void wr_kv_move(const wr_kv_cache *caches, int64_t num_caches, const int64_t *sources, const int64_t *destinations,
                int64_t count);

// One step's sequences as a KV group sees them (AttentionMetadata).
typedef struct wr_sequences {
    int32_t num_seqs;
    const int32_t *cu_seqlens_q;  // [num_seqs + 1]
    const int32_t *seqused_k;     // [num_seqs]
    const int32_t *block_table;   // [num_seqs, table_stride]
    int64_t table_stride;
    // [rows] or NULL: where a row is not 0, its query is a node of a tree. It sees the keys before its sequence's queries,
    // and of the n-th of these where bit n is set, itself included. Such a sequence has at most 64 queries.
    const int64_t *tree_mask;
} wr_sequences;

// What each thread does in a step's attention; made once per step and (group, window), used by every such layer.
typedef struct wr_attention_plan wr_attention_plan;
wr_attention_plan *wr_plan_attention(const wr_sequences *sequences, int32_t num_heads, int32_t num_kv_heads,
                                     int32_t head_dim, int32_t block_size, int32_t window);  // window 0: none
void wr_free_attention_plan(wr_attention_plan *plan);

// out[rows, num_heads * head_dim]: causal attention of queries (same shape) over the pages; softcap 0: none.
void wr_paged_attention(const wr_attention_plan *plan, const float *queries, int64_t q_stride, const wr_kv_cache *cache,
                        float scale, float softcap, float *out, int64_t out_stride);

// ---- sample.cpp -----------------------------------------------------------------------------------------------------

// token_ids[rows]: index of each row's largest logit, the first of equals.
void wr_argmax(const float *logits, int64_t stride, int64_t rows, int64_t vocab, int64_t *token_ids);

// token_ids[rows]: softmax(logits / temperature) restricted by min_p, then top_k (0: all), then top_p, then the token at
// which the running sum over token ids passes uniform * sum. See ../../runner/filters.py and draw.py for the definition.
void wr_sample(const float *logits, int64_t stride, int64_t rows, int64_t vocab, const float *temperature,
               const int32_t *top_k, const float *top_p, const float *min_p, const double *uniform, int64_t *token_ids);

// ---- step.cpp -------------------------------------------------------------------------------------------------------

// A decoder layer. Norm weights are ready to multiply with (Gemma's + 1 is in them); NULL: no such norm.
typedef struct wr_layer {
    const float *attention_norm;         // [hidden]
    const float *attention_output_norm;  // [hidden] or NULL
    const float *mlp_norm;               // [hidden]
    const float *mlp_output_norm;        // [hidden] or NULL
    const float *q_norm;                 // [head_dim] or NULL
    const float *k_norm;                 // [head_dim] or NULL
    const wr_weights *qkv;
    int32_t num_qkv;
    int32_t group;  // KV group: which plan and slots
    const wr_weights *out;
    const wr_weights *gate_up;
    int32_t num_gate_up;
    int32_t rope;  // which angles
    const wr_weights *down;
    wr_kv_cache cache;
} wr_layer;

typedef struct wr_decoder {
    const wr_layer *layers;
    int32_t num_layers;
    int32_t hidden;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t inner;
    int32_t rotary_dim;
    int32_t activation;  // wr_activation
    float norm_eps;
    float scale;
    float softcap;  // 0: none
} wr_decoder;

typedef struct wr_step {
    int64_t rows;
    const float *const *cos;  // per kind of rope [rows, rotary_dim / 2]
    const float *const *sin;
    const wr_attention_plan *const *plans;  // per KV group
    const int64_t *const *slots;            // per KV group [rows]
    wr_shm_group *group;                    // the ranks that have the layers' other parts; NULL: none, or the caller sums
    int32_t adds_residual;                  // whether the rank's part of a sum without an output norm has the residual
} wr_step;

// hidden[rows, hidden], in place, through the halves [first, end): half 2 n is the attention of layer n, half 2 n + 1 its
// MLP. Each ends in one sum over the group. Returns a wr_shm_fault and in *peer the rank at fault.
int32_t wr_decoder_forward(const wr_decoder *decoder, const wr_step *step, float *hidden, int32_t first, int32_t end,
                           int32_t *peer);

// ---- guess.cpp ------------------------------------------------------------------------------------------------------

// A head that guesses a token from a state and the token before it (../../models/recurrent_head.py).
typedef struct wr_guessing_head {
    const wr_weights *up;      // [inner, 2 * hidden]
    const wr_weights *down;    // [hidden, inner]
    const wr_weights *output;  // [tokens, hidden]
    float eps;                 // of its norms
} wr_guessing_head;

// state[rows, hidden], in place, reads the embeddings came[rows, hidden] of the tokens that came behind it; then the
// `count` largest of its logits, at most 32 and no more than there are: their places and log-probabilities [rows,
// count], the largest first.
void wr_guess(const wr_guessing_head *head, float *state, const float *came, int64_t rows, int32_t count,
              int64_t *places, float *logprobs);

#ifdef __cplusplus
}
#endif
