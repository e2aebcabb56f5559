// Which tokens a draw may choose: the least weight that min-p, top-k and top-p leave, by the definition of
// ../../runner/filters.py. Nothing is sorted: the end of a filter is found digit by digit, as in a radix sort that
// follows only the digit it is interested in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "sample_lanes.h"

namespace wr {

// Floats that are summed before doubles are: enough to make the doubles cheap, few enough to lose no digits.
constexpr int64_t kSumTile = 256;

// Sum of the weights that are at least `least`, of `count` <= kSumTile.
inline float tile_sum(const float *weights, int64_t count, float least) {
    constexpr int64_t kLanes = Vec::kLanes;
    const Vec bound = set1(least);
    Vec left = set1(0.0f), right = set1(0.0f);
    int64_t i = 0;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
        const Vec a = load(weights + i), b = load(weights + i + kLanes);
        left = left + keep(a, a, bound);
        right = right + keep(b, b, bound);
    }
    float sum = reduce_add(left + right);
    for (; i < count; ++i) sum += weights[i] >= least ? weights[i] : 0.0f;
    return sum;
}

inline double sum_at_least(const float *weights, int64_t count, float least) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i += kSumTile) sum += tile_sum(weights + i, std::min(kSumTile, count - i), least);
    return sum;
}

// Copy the weights that are at least `least`; their number. `out` has room for a vector more.
inline int64_t copy_at_least(const float *weights, int64_t count, float least, float *out) {
    constexpr int64_t kLanes = Vec::kLanes;
    int64_t kept = 0, i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const Vec x = load(weights + i);
        kept += compress(out + kept, x, at_least(x, set1(least)));
    }
    for (; i < count; ++i) {
        if (weights[i] >= least) out[kept++] = weights[i];
    }
    return kept;
}

enum class Measure { kCount, kWeight };

// The largest value v of `values` [0, 1] such that those >= v measure `wanted` together; their smallest if all do not.
// `values` is overwritten.
template <Measure kMeasure>
float select(float *values, int64_t count, double wanted) {
    // The bits of floats that are not negative are ordered as they are. 1.0 is 254 << 22: each digit has 8 bits.
    constexpr int kShifts[] = {22, 14, 6, 0};
    for (const int shift : kShifts) {
        if (count == 1) break;
        const auto digit = [shift](float value) {
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            return (bits >> shift) & (shift == 0 ? 63 : 255);
        };
        // Two sums for each digit, in turns: neighbours of one digit do not wait for each other.
        double sums[2][256] = {};
        for (int64_t i = 0; i < count; ++i) {
            sums[i & 1][digit(values[i])] += kMeasure == Measure::kCount ? 1.0 : static_cast<double>(values[i]);
        }
        uint32_t chosen = 0;
        double above = 0.0;
        for (int d = 255; d >= 0; --d) {
            const double here = sums[0][d] + sums[1][d];
            if (here == 0.0) continue;
            chosen = static_cast<uint32_t>(d);
            if (above + here >= wanted) break;
            above += here;
        }
        wanted -= above;
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            const float value = values[i];
            values[kept] = value;
            kept += digit(value) == chosen;
        }
        count = kept;
    }
    return values[0];
}

struct Filter {
    int64_t top_k;  // 0: all
    float top_p;
    float min_p;
};

// The least weight that may be drawn. Weights are exp(logit - largest logit): the best is 1. `buffer` has room for
// all and a vector more.
inline float least_kept(const float *weights, int64_t count, const Filter &filter, float *buffer) {
    const bool limited = filter.top_k > 0 && filter.top_k < count;
    float least = filter.min_p;
    double surplus = 0.0;  // weights tied with the last of top-k: kept, but top-p reckons without them
    if (limited) {
        const float last = select<Measure::kCount>(buffer, copy_at_least(weights, count, 0.0f, buffer), filter.top_k);
        if (last >= least) {
            const int64_t kept = copy_at_least(weights, count, last, buffer);
            surplus = static_cast<double>(kept - filter.top_k) * last;
            least = last;
        }
    }
    if (filter.top_p >= 1.0f) return least;
    const double total = sum_at_least(weights, count, least) - surplus;
    const double wanted = static_cast<double>(filter.top_p) * total;
    // Weights so small that all such together are less than what top-p leaves out need not be looked at.
    const double share = (1.0 - filter.top_p) * total * 0.99 / static_cast<double>(count);
    const int64_t candidates = copy_at_least(weights, count, std::max(least, static_cast<float>(share)), buffer);
    return select<Measure::kWeight>(buffer, candidates, wanted);
}

}  // namespace wr
