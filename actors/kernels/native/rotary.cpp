// Norms of single heads and rotary position embedding (Su et al., 2021), half-split, in place.
#include "pool.h"
#include "rms_norm.h"
#include "warmroot.h"

namespace wr {
namespace {

// Elements below which a second thread costs more than it brings.
constexpr int64_t kLeastElements = 16384;

struct Heads {
    int32_t head_dim;
    int32_t half;  // rotary_dim / 2
    float eps;
};

void norm_head(float *head, const float *weight, const Heads &heads) {
    constexpr int kLanes = Vec::kLanes;
    const Vec scale = set1(inverse_rms(head, heads.head_dim, heads.eps));
    for (int i = 0; i < heads.head_dim; i += kLanes) {
        const int count = heads.head_dim - i < kLanes ? heads.head_dim - i : kLanes;
        store(head + i, load(head + i, count) * scale * load(weight + i, count), count);
    }
}

// (left, right) -> (left cos - right sin, right cos + left sin) for count lanes at `left`.
inline void turn(float *left, float *right, const float *cos, const float *sin, int count) {
    const Vec c = load(cos, count), s = load(sin, count), l = load(left, count), r = load(right, count);
    store(left, fma(l, c, set1(0.0f) - r * s), count);
    store(right, fma(r, c, l * s), count);
}

void turn_heads(float *head, int num_heads, const float *weight, const float *cos, const float *sin,
                const Heads &heads) {
    constexpr int kLanes = Vec::kLanes;
    for (int n = 0; n < num_heads; ++n, head += heads.head_dim) {
        if (weight != nullptr) norm_head(head, weight, heads);
        for (int i = 0; i < heads.half; i += kLanes) {
            const int count = heads.half - i < kLanes ? heads.half - i : kLanes;
            turn(head + i, head + heads.half + i, cos + i, sin + i, count);
        }
    }
}

}  // namespace
}  // namespace wr

extern "C" void wr_rotary(float *qkv, int64_t stride, int64_t rows, int32_t num_heads, int32_t num_kv_heads,
                          int32_t head_dim, const float *q_norm, const float *k_norm, float eps, const float *cos,
                          const float *sin, int32_t rotary_dim) {
    const wr::Heads heads{head_dim, rotary_dim / 2, eps};
    const int64_t size = static_cast<int64_t>(num_heads + num_kv_heads) * head_dim;
    wr::parallel_for(rows, wr::grain_for(rows, wr::kLeastElements / (size + 1) + 1), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float *head = qkv + r * stride;
            const float *c = cos + r * heads.half, *s = sin + r * heads.half;
            wr::turn_heads(head, num_heads, q_norm, c, s, heads);
            wr::turn_heads(head + num_heads * head_dim, num_kv_heads, k_norm, c, s, heads);
        }
    });
}
