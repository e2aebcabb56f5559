// Root mean square norm (Zhang and Sennrich, 2019).
#include "rms_norm.h"

#include "pool.h"
#include "warmroot.h"

namespace wr {
namespace {

// Elements below which a second thread costs more than it brings.
constexpr int64_t kLeastElements = 32768;

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

}  // namespace
}  // namespace wr

extern "C" void wr_rms_norm(const float *x, int64_t x_stride, const float *weight, float eps, float *out,
                            int64_t out_stride, int64_t rows, int64_t size, int32_t accumulate) {
    const auto row = accumulate ? wr::norm_row<true> : wr::norm_row<false>;
    wr::parallel_for(rows, wr::grain_for(rows, wr::kLeastElements / (size + 1) + 1), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) row(x + r * x_stride, weight, eps, out + r * out_stride, size);
    });
}
