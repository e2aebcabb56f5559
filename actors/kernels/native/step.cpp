// All layers of one step in one call: at one row a layer is microseconds, less than Python needs to ask for it.
#include <algorithm>

#include "pool.h"
#include "warmroot.h"

namespace {

// Rows that go through an MLP together: more would push its wide intermediate values out of the caches.
constexpr int64_t kMlpRows = 256;

int64_t rounded(int64_t floats) { return (floats + 15) / 16 * 16; }

// Where one step's intermediate values lie. What is not alive at the same time shares memory.
struct Buffers {
    float *normed;  // [rows, hidden]
    float *wide;    // [rows, q, k and v heads], then [mlp rows, 2 * inner]
    float *mixed;   // [rows, num_heads * head_dim], then [mlp rows, inner]
    float *output;  // [rows, hidden], what an output norm reads

    Buffers(const wr_decoder &decoder, int64_t rows) {
        const int64_t mlp_rows = std::min(rows, kMlpRows);
        const int64_t heads = decoder.num_heads + 2 * decoder.num_kv_heads;
        const int64_t narrow = rounded(rows * decoder.hidden);
        const int64_t wide_size = rounded(std::max(rows * heads * decoder.head_dim, mlp_rows * 2 * decoder.inner));
        const int64_t mixed_size =
            rounded(std::max(rows * decoder.num_heads * decoder.head_dim, mlp_rows * decoder.inner));
        normed = static_cast<float *>(
            wr::scratch(wr::Scratch::kStep, (2 * narrow + wide_size + mixed_size) * sizeof(float)));
        output = normed + narrow;
        wide = output + narrow;
        mixed = wide + wide_size;
    }
};

// This rank's part of what a half adds: W * x, to the residual stream, or into `output` where a norm comes first.
void project(const wr_decoder &decoder, const wr_step &step, const wr_weights *weights, const float *x, int64_t x_stride,
             const float *norm, float *output, float *hidden, int64_t rows) {
    const bool is_normed = norm != nullptr;
    wr_linear(weights, 1, x, x_stride, is_normed ? output : hidden, decoder.hidden, rows,
              !is_normed && step.adds_residual);
}

// The sum of all ranks' parts, and the norm where the family has one there.
int32_t finish(const wr_decoder &decoder, const wr_step &step, const float *norm, float *output, float *hidden,
               int32_t *peer) {
    const int64_t size = decoder.hidden;
    const bool is_normed = norm != nullptr;
    if (step.group != nullptr) {
        const int32_t fault =
            wr_shm_all_reduce(step.group, is_normed ? output : hidden, step.rows * size, WR_SHM_FLOAT32, peer);
        if (fault != WR_SHM_OK) return fault;
    }
    if (is_normed) wr_rms_norm(output, size, norm, decoder.norm_eps, hidden, size, step.rows, size, 1);
    return WR_SHM_OK;
}

void attention(const wr_decoder &decoder, const wr_layer &layer, const wr_step &step, const Buffers &buffers,
               float *hidden) {
    const int64_t rows = step.rows, size = decoder.hidden;
    const int64_t q_size = int64_t{decoder.num_heads} * decoder.head_dim;
    const int64_t kv_size = int64_t{decoder.num_kv_heads} * decoder.head_dim;
    const int64_t stride = q_size + 2 * kv_size;
    float *qkv = buffers.wide;
    wr_rms_norm(hidden, size, layer.attention_norm, decoder.norm_eps, buffers.normed, size, rows, size, 0);
    wr_linear(layer.qkv, layer.num_qkv, buffers.normed, size, qkv, stride, rows, 0);
    wr_rotary(qkv, stride, rows, decoder.num_heads, decoder.num_kv_heads, decoder.head_dim, layer.q_norm, layer.k_norm,
              decoder.norm_eps, step.cos[layer.rope], step.sin[layer.rope], decoder.rotary_dim);
    wr_kv_append(qkv + q_size, qkv + q_size + kv_size, stride, rows, &layer.cache, step.slots[layer.group]);
    wr_paged_attention(step.plans[layer.group], qkv, stride, &layer.cache, decoder.scale, decoder.softcap, buffers.mixed,
                       q_size);
    project(decoder, step, layer.out, buffers.mixed, q_size, layer.attention_output_norm, buffers.output, hidden, rows);
}

void mlp(const wr_decoder &decoder, const wr_layer &layer, const wr_step &step, const Buffers &buffers, float *output,
         float *hidden, int64_t rows) {
    const int64_t size = decoder.hidden, inner = decoder.inner;
    wr_rms_norm(hidden, size, layer.mlp_norm, decoder.norm_eps, buffers.normed, size, rows, size, 0);
    wr_linear(layer.gate_up, layer.num_gate_up, buffers.normed, size, buffers.wide, 2 * inner, rows, 0);
    wr_gated(buffers.wide, 2 * inner, rows, inner, decoder.activation, buffers.mixed, inner);
    project(decoder, step, layer.down, buffers.mixed, inner, layer.mlp_output_norm, output, hidden, rows);
}

}  // namespace

extern "C" int32_t wr_decoder_forward(const wr_decoder *decoder, const wr_step *step, float *hidden, int32_t first,
                                      int32_t end, int32_t *peer) {
    const Buffers buffers(*decoder, step->rows);
    int32_t fault = WR_SHM_OK;
    for (int32_t half = first; half < end && fault == WR_SHM_OK; ++half) {
        const wr_layer &layer = decoder->layers[half / 2];
        if (half % 2 == 0) {
            attention(*decoder, layer, *step, buffers, hidden);
            fault = finish(*decoder, *step, layer.attention_output_norm, buffers.output, hidden, peer);
            continue;
        }
        for (int64_t row = 0; row < step->rows; row += kMlpRows) {
            const int64_t at = row * decoder->hidden;
            mlp(*decoder, layer, *step, buffers, buffers.output + at, hidden + at, std::min(kMlpRows, step->rows - row));
        }
        fault = finish(*decoder, *step, layer.mlp_output_norm, buffers.output, hidden, peer);
    }
    return fault;
}
