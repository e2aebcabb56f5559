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

// hidden += W * x, through a norm where the family has one there.
void add_output(const wr_decoder &decoder, const wr_weights *weights, const float *x, int64_t x_stride, const float *norm,
                float *output, float *hidden, int64_t rows) {
    const int64_t size = decoder.hidden;
    if (norm == nullptr) {
        wr_linear(weights, 1, x, x_stride, hidden, size, rows, 1);
        return;
    }
    wr_linear(weights, 1, x, x_stride, output, size, rows, 0);
    wr_rms_norm(output, size, norm, decoder.norm_eps, hidden, size, rows, size, 1);
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
    add_output(decoder, layer.out, buffers.mixed, q_size, layer.attention_output_norm, buffers.output, hidden, rows);
}

void mlp(const wr_decoder &decoder, const wr_layer &layer, const Buffers &buffers, float *hidden, int64_t rows) {
    const int64_t size = decoder.hidden, inner = decoder.inner;
    wr_rms_norm(hidden, size, layer.mlp_norm, decoder.norm_eps, buffers.normed, size, rows, size, 0);
    wr_linear(layer.gate_up, layer.num_gate_up, buffers.normed, size, buffers.wide, 2 * inner, rows, 0);
    wr_gated(buffers.wide, 2 * inner, rows, inner, decoder.activation, buffers.mixed, inner);
    add_output(decoder, layer.down, buffers.mixed, inner, layer.mlp_output_norm, buffers.output, hidden, rows);
}

}  // namespace

extern "C" void wr_decoder_forward(const wr_decoder *decoder, const wr_step *step, float *hidden) {
    const Buffers buffers(*decoder, step->rows);
    for (int32_t index = 0; index < decoder->num_layers; ++index) {
        const wr_layer &layer = decoder->layers[index];
        attention(*decoder, layer, *step, buffers, hidden);
        for (int64_t first = 0; first < step->rows; first += kMlpRows) {
            mlp(*decoder, layer, buffers, hidden + first * decoder->hidden, std::min(kMlpRows, step->rows - first));
        }
    }
}
