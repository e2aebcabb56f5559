// The activation of the gated feed-forward block.
#include "pool.h"
#include "simd.h"
#include "warmroot.h"

namespace wr {
namespace {

// Outputs below which a second thread costs more than it brings.
constexpr int64_t kLeastElements = 4096;

// (1 + tanh(u)) / 2 is sigmoid(2u): one division, and no digits lost where tanh is near -1.
inline Vec gelu_tanh(Vec x) {
    const Vec u = x * fma(x * x, set1(2 * 0.7978845608028654f * 0.044715f), set1(2 * 0.7978845608028654f));
    return x / (set1(1.0f) + exp(set1(0.0f) - u));
}

template <int32_t kActivation>
void gate_row(const float *gate, const float *up, float *out, int64_t inner) {
    constexpr int64_t kLanes = Vec::kLanes;
    const auto activate = [](Vec x) { return kActivation == WR_SILU ? silu(x) : gelu_tanh(x); };
    int64_t i = 0;
    // Two at a time: the chain of an exponential is long.
    for (; i + 2 * kLanes <= inner; i += 2 * kLanes) {
        const Vec left = activate(load(gate + i)), right = activate(load(gate + i + kLanes));
        store(out + i, left * load(up + i));
        store(out + i + kLanes, right * load(up + i + kLanes));
    }
    for (; i < inner; i += kLanes) {
        const int count = static_cast<int>(inner - i < kLanes ? inner - i : kLanes);
        store(out + i, activate(load(gate + i, count)) * load(up + i, count), count);
    }
}

}  // namespace
}  // namespace wr

extern "C" void wr_gated(const float *gate_up, int64_t stride, int64_t rows, int64_t inner, int32_t activation,
                         float *out, int64_t out_stride) {
    const auto row = activation == WR_SILU ? wr::gate_row<WR_SILU> : wr::gate_row<WR_GELU_TANH>;
    wr::parallel_for(rows, wr::grain_for(rows, wr::kLeastElements / (inner + 1) + 1), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float *gate = gate_up + r * stride;
            row(gate, gate + inner, out + r * out_stride, inner);
        }
    });
}
