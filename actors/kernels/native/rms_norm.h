// The root mean square norm of one vector: a row, or a single head.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace wr {

// 1 / sqrt(mean(x^2) + eps). Four running sums: one would wait for each addition before the next.
inline float inverse_rms(const float *x, int64_t size, float eps) {
    constexpr int64_t kLanes = Vec::kLanes;
    Vec sums[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
        for (int j = 0; j < 4; ++j) {
            const Vec v = load(x + i + j * kLanes);
            sums[j] = fma(v, v, sums[j]);
        }
    }
    for (; i + kLanes <= size; i += kLanes) {
        const Vec v = load(x + i);
        sums[0] = fma(v, v, sums[0]);
    }
    if (i < size) {
        const Vec v = load(x + i, static_cast<int>(size - i));
        sums[1] = fma(v, v, sums[1]);
    }
    const float sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
    return 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
}

// out (+)= x / sqrt(mean(x^2) + eps) * weight; out may be x.
template <bool kAccumulate>
void norm_row(const float *x, const float *weight, float eps, float *out, int64_t size) {
    constexpr int64_t kLanes = Vec::kLanes;
    const Vec scale = set1(inverse_rms(x, size, eps));
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const Vec y = load(x + i) * scale * load(weight + i);
        store(out + i, kAccumulate ? load(out + i) + y : y);
    }
    if (i < size) {
        const int rest = static_cast<int>(size - i);
        const Vec y = load(x + i, rest) * scale * load(weight + i, rest);
        store(out + i, kAccumulate ? load(out + i, rest) + y : y, rest);
    }
}

}  // namespace wr
