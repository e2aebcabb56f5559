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

// (left, right) -> (left cos - right sin, right cos + left sin)
inline void turn(Vec &left, Vec &right, Vec cos, Vec sin) {
    const Vec l = left, r = right;
    left = fma(l, cos, set1(0.0f) - r * sin);
    right = fma(r, cos, l * sin);
}

void turn_head(float *left, float *right, const float *cos, const float *sin, int half) {
    constexpr int kLanes = Vec::kLanes;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        Vec l = load(left + i), r = load(right + i);
        turn(l, r, load(cos + i), load(sin + i));
        store(left + i, l);
        store(right + i, r);
    }
    if (i < half) {
        const int rest = half - i;
        Vec l = load(left + i, rest), r = load(right + i, rest);
        turn(l, r, load(cos + i, rest), load(sin + i, rest));
        store(left + i, l, rest);
        store(right + i, r, rest);
    }
}

void turn_heads(float *head, int num_heads, const float *weight, const float *cos, const float *sin,
                const Heads &heads) {
    for (int n = 0; n < num_heads; ++n, head += heads.head_dim) {
        if (weight != nullptr) norm_row<false>(head, weight, heads.eps, head, heads.head_dim);
        turn_head(head, head + heads.half, cos, sin, heads.half);
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
