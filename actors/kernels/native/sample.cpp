// Drawing a token from each row's filtered distribution.
#include <cmath>

#include "pool.h"
#include "sample_filter.h"
#include "warmroot.h"

namespace wr {
namespace {

constexpr int64_t kLanes = Vec::kLanes;
// Tokens that share one maximum in the search for the top k: a column of this many vectors.
constexpr int64_t kColumn = 16;
constexpr int64_t kBlock = kColumn * kLanes;
// Below this exp is 0 for all that it can matter to (and wr::exp is not).
constexpr float kLowest = -87.0f;

// Weights of tokens, in ascending order of their ids.
struct Candidates {
    float *weights;
    const int32_t *token_ids;  // NULL: 0, 1, 2, ...
    int64_t count;
};

struct Memory {
    float *weights;
    float *buffer;
    float *maxima;
    int32_t *token_ids;

    explicit Memory(int64_t vocab) {
        const int64_t padded = (vocab / kBlock + 2) * kBlock;
        weights = static_cast<float *>(scratch(Scratch::kSample, static_cast<size_t>(padded) * 4 * sizeof(float)));
        buffer = weights + padded;
        maxima = buffer + padded;
        token_ids = reinterpret_cast<int32_t *>(maxima + padded);
    }
};

// One maximum for each column of each block (the last, short one included), and the peak of all.
Peak column_maxima(const float *logits, int64_t vocab, float *maxima) {
    Peak peak = no_peak();
    for (int64_t begin = 0; begin < vocab; begin += kBlock, maxima += kLanes) {
        Peak left{set1(-INFINITY), peak.spoilt}, right = no_peak();
        if (begin + kBlock <= vocab) {
            for (int64_t i = begin; i < begin + kBlock; i += 2 * kLanes) {
                look(left, load(logits + i));
                look(right, load(logits + i + kLanes));
            }
        } else {
            float lanes[kLanes];
            for (int64_t i = begin; i < vocab; i += kLanes) {
                const int64_t count = std::min(kLanes, vocab - i);
                for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = lane < count ? logits[i + lane] : -INFINITY;
                look(left, load(lanes));
            }
        }
        const Vec largest = max(left.largest, right.largest);
        store(maxima, largest);
        peak = {max(peak.largest, largest), left.spoilt + right.spoilt};
    }
    return peak;
}

int64_t count_at_least(const float *values, int64_t count, float least) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += kLanes) found += __builtin_popcount(at_least(load(values + i), set1(least)));
    return found;
}

// A value that at least `wanted` of the maxima reach, and not many more: so many tokens reach it too.
float bound_of(const float *maxima, int64_t count, int64_t wanted, float low, float high) {
    for (int step = 0; step < 16; ++step) {
        const float middle = low + (high - low) * 0.5f;
        const int64_t found = count_at_least(maxima, count, middle);
        (found >= wanted ? low : high) = middle;
        if (found >= wanted && found <= wanted + wanted / 8) break;
    }
    return low;
}

// The tokens whose logits are at least `least`: logits in place of weights.
Candidates collect(const float *logits, int64_t vocab, float least, const Memory &memory) {
    int64_t count = 0;
    const auto take = [&](float logit, int64_t token) {
        memory.weights[count] = logit;
        memory.token_ids[count++] = static_cast<int32_t>(token);
    };
    for (int64_t begin = 0; begin < vocab; begin += kBlock) {
        if (at_least(load(memory.maxima + begin / kColumn), set1(least)) == 0) continue;
        const int64_t end = std::min(begin + kBlock, vocab);
        int64_t i = begin;
        for (; i + kLanes <= end; i += kLanes) {
            for (uint32_t bits = at_least(load(logits + i), set1(least)); bits != 0; bits &= bits - 1) {
                const int64_t token = i + __builtin_ctz(bits);
                take(logits[token], token);
            }
        }
        for (; i < end; ++i) {
            if (logits[i] >= least) take(logits[i], i);
        }
    }
    return {memory.weights, memory.token_ids, count};
}

// weights = exp((logits - largest) / temperature); both have room for a vector more or are the same.
void weigh(const float *logits, int64_t count, float largest, float temperature, float *weights) {
    const auto weight = [&](Vec logit) {
        const Vec x = (logit - set1(largest)) / set1(temperature);
        return keep(exp(x), x, set1(kLowest));
    };
    int64_t i = 0;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
        const Vec left = weight(load(logits + i)), right = weight(load(logits + i + kLanes));
        store(weights + i, left);
        store(weights + i + kLanes, right);
    }
    for (; i < count; i += kLanes) {
        const int rest = static_cast<int>(std::min(kLanes, count - i));
        store(weights + i, weight(load(logits + i, rest)), rest);
    }
}

// The first place where the running sum of weights >= least passes uniform * sum, at the latest where it stops growing.
// Sums of tiles first, then inside one tile. `sums` has room for one double per tile.
int64_t find(const Candidates &from, float least, double uniform, double *sums) {
    const int64_t tiles = (from.count + kSumTile - 1) / kSumTile;
    double total = 0.0;
    for (int64_t t = 0; t < tiles; ++t) {
        total += tile_sum(from.weights + t * kSumTile, std::min(kSumTile, from.count - t * kSumTile), least);
        sums[t] = total;
    }
    const double target = uniform * total;
    int64_t tile = 0;
    while (sums[tile] <= target && sums[tile] < total) ++tile;
    double sum = tile == 0 ? 0.0 : sums[tile - 1];
    int64_t place = tile * kSumTile;
    for (int64_t i = place; i < std::min(place + kSumTile, from.count); ++i) {
        if (from.weights[i] < least || from.weights[i] == 0.0f) continue;
        place = i;
        sum += static_cast<double>(from.weights[i]);
        if (sum > target) break;
    }
    return place;
}

int64_t sample_row(const float *logits, int64_t vocab, float temperature, const Filter &filter, double uniform) {
    const Memory memory(vocab);
    const Peak peak = column_maxima(logits, vocab, memory.maxima);
    const float largest = reduce_max(peak.largest);
    if (is_spoilt(peak) || largest == -INFINITY) return 0;

    Candidates from{memory.weights, nullptr, vocab};
    const int64_t columns = (vocab + kBlock - 1) / kBlock * kLanes;
    if (filter.top_k > 0 && filter.top_k * 4 <= columns) {
        const float lowest = largest + kLowest * temperature;
        from = collect(logits, vocab, bound_of(memory.maxima, columns, filter.top_k, lowest, largest), memory);
        weigh(from.weights, from.count, largest, temperature, from.weights);
    } else {
        weigh(logits, vocab, largest, temperature, from.weights);
    }
    const bool filtered = filter.top_k > 0 || filter.top_p < 1.0f || filter.min_p > 0.0f;
    const float least = filtered ? least_kept(from.weights, from.count, filter, memory.buffer) : 0.0f;
    const int64_t place = find(from, least, uniform, reinterpret_cast<double *>(memory.buffer));
    return from.token_ids == nullptr ? place : from.token_ids[place];
}

}  // namespace
}  // namespace wr

extern "C" void wr_sample(const float *logits, int64_t stride, int64_t rows, int64_t vocab, const float *temperature,
                          const int32_t *top_k, const float *top_p, const float *min_p, const double *uniform,
                          int64_t *token_ids) {
    wr::parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float *row = logits + r * stride;
            if (temperature[r] == 0.0f) {
                wr_argmax(row, stride, 1, vocab, token_ids + r);
            } else {
                const wr::Filter filter{top_k[r], top_p[r], min_p[r]};
                token_ids[r] = wr::sample_row(row, vocab, temperature[r], filter, uniform[r]);
            }
        }
    });
}
