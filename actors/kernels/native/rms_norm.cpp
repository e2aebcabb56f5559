// Root mean square norm (Zhang and Sennrich, 2019).
#include "rms_norm.h"

#include "pool.h"
#include "warmroot.h"

namespace wr {
namespace {

// Elements below which a second thread costs more than it brings.
constexpr int64_t kLeastElements = 32768;

}  // namespace
}  // namespace wr

extern "C" void wr_rms_norm(const float *x, int64_t x_stride, const float *weight, float eps, float *out,
                            int64_t out_stride, int64_t rows, int64_t size, int32_t accumulate) {
    const auto row = accumulate ? wr::norm_row<true> : wr::norm_row<false>;
    wr::parallel_for(rows, wr::grain_for(rows, wr::kLeastElements / (size + 1) + 1), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) row(x + r * x_stride, weight, eps, out + r * out_stride, size);
    });
}
