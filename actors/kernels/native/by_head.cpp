// Products by a matrix of each head. Sums run along `inner` in order, so a row is the same bits whatever else there is.
#include <algorithm>

#include "pool.h"
#include "simd.h"
#include "warmroot.h"

namespace wr {
namespace {

// Rows and vectors of outputs whose sums stay in registers.
constexpr int kRows = 4;
constexpr int kVectors = Vec::kLanes == 16 ? 4 : 2;

// Multiplications below which a second thread costs more than it brings.
constexpr int64_t kLeastWork = 32768;

// V vectors of outputs; the last of them has `count` lanes.
template <int R, int V>
void multiply_vectors(const float *x, int64_t stride, const float *weights, float *out, int64_t out_stride,
                      int32_t inner, int32_t outer, int count) {
    Vec sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[r][v] = set1(0.0f);
    }
    for (int32_t i = 0; i < inner; ++i, weights += outer) {
        Vec weight[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const float *at = weights + v * Vec::kLanes;
            weight[v] = v + 1 < V || count == Vec::kLanes ? load(at) : load(at, count);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec value = set1(x[r * stride + i]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] = fma(value, weight[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            float *at = out + r * out_stride + v * Vec::kLanes;
            if (v + 1 < V || count == Vec::kLanes) store(at, sums[r][v]);
            else store(at, sums[r][v], count);
        }
    }
}

template <int R>
void multiply_rows(const float *x, int64_t stride, const float *weights, float *out, int64_t out_stride, int32_t inner,
                   int32_t outer) {
    int32_t o = 0;
    for (; o + kVectors * Vec::kLanes <= outer; o += kVectors * Vec::kLanes) {
        multiply_vectors<R, kVectors>(x, stride, weights + o, out + o, out_stride, inner, outer, Vec::kLanes);
    }
    for (; o < outer; o += Vec::kLanes) {
        const int count = std::min(Vec::kLanes, outer - o);
        multiply_vectors<R, 1>(x, stride, weights + o, out + o, out_stride, inner, outer, count);
    }
}

template <int R = kRows>
void multiply(int64_t rows, const float *x, int64_t stride, const float *weights, float *out, int64_t out_stride,
              int32_t inner, int32_t outer) {
    if (rows == R) return multiply_rows<R>(x, stride, weights, out, out_stride, inner, outer);
    if constexpr (R > 1) multiply<R - 1>(rows, x, stride, weights, out, out_stride, inner, outer);
}

}  // namespace
}  // namespace wr

extern "C" void wr_by_head(const float *x, int64_t x_stride, int64_t x_head_stride, const float *weights, float *out,
                           int64_t rows, int32_t heads, int32_t inner, int32_t outer) {
    const int64_t groups = (rows + wr::kRows - 1) / wr::kRows, size = static_cast<int64_t>(inner) * outer;
    const int64_t out_stride = static_cast<int64_t>(heads) * outer, least = wr::kLeastWork / (size + 1) + 1;
    // The groups of one head follow each other: its matrix stays in the cache.
    wr::parallel_for(heads * groups, wr::grain_for(heads * groups, least), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t head = i / groups, row = i % groups * wr::kRows;
            wr::multiply(std::min<int64_t>(wr::kRows, rows - row), x + row * x_stride + head * x_head_stride, x_stride,
                         weights + head * size, out + row * out_stride + head * outer, out_stride, inner, outer);
        }
    });
}
