// A few rows over one tile of keys: the inner loops of attention.
//
// A row is a query of one head. Its softmax runs along the keys: the largest score so far, the sum of the weights, and
// the weighted sum of the values, both rescaled when a larger score comes (Milakov and Gimelshein, 2018; Dao, 2022).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "paged_attention_pages.h"
#include "simd.h"

namespace wr {

// Rows and vectors that the inner loops keep in registers: 6 x 4 sums of 32, 6 x 2 of 16.
constexpr int kRows = 6;
constexpr int kVectors = Vec::kLanes == 16 ? 4 : 2;

// Keys of a tree that a row does not see: bit n is the key begin + n.
struct Hidden {
    int32_t begin;
    uint64_t keys;

    // Those of the tile that begins at a key.
    uint64_t of_tile(int32_t tile) const {
        const int32_t shift = begin - tile;
        if (keys == 0 || shift >= kTileKeys || shift <= -64) return 0;
        return shift >= 0 ? keys << shift : keys >> -shift;
    }
};

static_assert(kTileKeys == 64, "a tile's keys are the bits of one number");

inline void fill_hidden(float *scores, uint64_t hidden, float value) {
    for (; hidden != 0; hidden &= hidden - 1) scores[std::countr_zero(hidden)] = value;
}

// Up to kRows rows; all arrays belong to the thread.
struct Rows {
    int count;
    const float *queries;       // [head_dim, count], scaled
    const int32_t *first_keys;  // [count] first key that a row sees
    const int32_t *last_keys;   // [count] and its last one
    const Hidden *hidden;       // [count] and which of these it does not see
    float *weights;             // [kRows, kTileKeys] scores of the tile, then their weights
    float *best;                // [count] largest score so far
    float *totals;              // [count, kLanes] sums of weights, lane by lane
    float *sums;                // [count, padded_dim] weighted sums of values
};

// scores[row, key] of V vectors of keys. A vector of keys is read once for all rows, a query's number once for V.
template <int R, int V, class Format>
void score_vectors(const float *queries, const Tile<Format> &tile, int first, int head_dim, float *scores) {
    Vec sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[r][v] = set1(0.0f);
    }
    const typename Format::Element *keys[V], *next_keys[V];
    for (int v = 0; v < V; ++v) {
        keys[v] = tile.keys[first + v];
        next_keys[v] = tile.next_keys[first + v];
    }
    for (int64_t d = 0, at = 0; d < head_dim; ++d, at += tile.key_stride, queries += R) {
        Vec key[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            __builtin_prefetch(next_keys[v] + at);
            key[v] = Format::load(keys[v] + at);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec query = set1(queries[r]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] = fma(query, key[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(scores + r * kTileKeys + (first + v) * Vec::kLanes, sums[r][v]);
    }
}

template <int R, int V = kVectors, class AnyTile>
void score(const float *queries, const AnyTile &tile, int first, int last, int head_dim, float *scores) {
    for (; first + V <= last; first += V) score_vectors<R, V>(queries, tile, first, head_dim, scores);
    if constexpr (V > 1) score<R, V - 1>(queries, tile, first, last, head_dim, scores);
}

// Scores [first, last) of a row, of which it sees [low, high) but the hidden ones, become weights. Returns what earlier
// sums are worth.
inline float soften(float *scores, int first, int last, int low, int high, uint64_t hidden, float softcap, float *best,
                    float *totals) {
    hidden &= low < high ? (~uint64_t{0} >> (63 - (high - 1))) & (~uint64_t{0} << low) : 0;
    if (low >= high || std::popcount(hidden) == high - low) {
        std::fill(scores + first, scores + last, 0.0f);
        return 1.0f;
    }
    if (softcap > 0.0f) {
        const Vec cap = set1(softcap), inverse = set1(1.0f / softcap);
        for (int k = first; k < last; k += Vec::kLanes) store(scores + k, tanh(load(scores + k) * inverse) * cap);
    }
    std::fill(scores + first, scores + low, -INFINITY);
    std::fill(scores + high, scores + last, -INFINITY);
    fill_hidden(scores, hidden, -INFINITY);
    Vec largest = load(scores + first);
    for (int k = first + Vec::kLanes; k < last; k += Vec::kLanes) largest = max(largest, load(scores + k));
    const float former = *best, now = std::max(former, reduce_max(largest));
    float worth[Vec::kLanes];
    store(worth, former == now ? set1(1.0f) : exp(set1(former - now)));
    *best = now;
    Vec total = load(totals) * load(worth);
    for (int k = first; k < last; k += Vec::kLanes) {
        const Vec weight = exp(load(scores + k) - set1(now));
        store(scores + k, weight);
        total = total + weight;
    }
    store(totals, total);
    // exp leaves a trace of -inf, and a hidden value times that would be seen if it is large.
    std::fill(scores + first, scores + low, 0.0f);
    std::fill(scores + high, scores + last, 0.0f);
    fill_hidden(scores, hidden, 0.0f);
    return worth[0];
}

// sums[row, V vectors from d on] = worth * sums + weights * values, for keys [low, high).
template <int R, int V, class Format>
void mix_vectors(const float *weights, const float *worth, const Tile<Format> &tile, int low, int high, int d,
                 float *sums, int padded_dim) {
    Vec mixed[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const Vec scale = set1(worth[r]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) mixed[r][v] = load(sums + r * padded_dim + d + v * Vec::kLanes) * scale;
    }
    for (int key = low; key < high;) {
        const int vector = key / Vec::kLanes, end = std::min((vector + 1) * Vec::kLanes, high);
        const int64_t at = (key % Vec::kLanes) * tile.value_stride + d;
        const typename Format::Element *values = tile.values[vector] + at, *next_values = tile.next_values[vector] + at;
        for (; key < end; ++key, values += tile.value_stride, next_values += tile.value_stride) {
            Vec value[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                __builtin_prefetch(next_values + v * Vec::kLanes);
                value[v] = Format::load(values + v * Vec::kLanes);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Vec weight = set1(weights[r * kTileKeys + key]);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) mixed[r][v] = fma(weight, value[v], mixed[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(sums + r * padded_dim + d + v * Vec::kLanes, mixed[r][v]);
    }
}

template <int R, int V, class Format>
void mix(const float *weights, const float *worth, const Tile<Format> &tile, int low, int high, int d, float *sums,
         int padded_dim) {
    for (; d + V * Vec::kLanes <= padded_dim; d += V * Vec::kLanes) {
        mix_vectors<R, V>(weights, worth, tile, low, high, d, sums, padded_dim);
    }
    if constexpr (V > 1) mix<R, V - 1>(weights, worth, tile, low, high, d, sums, padded_dim);
}

template <int R, class Format>
void mix_tile(const float *weights, const float *worth, const Tile<Format> &tile, int low, int high, float *sums,
              int padded_dim) {
    mix<R, kVectors>(weights, worth, tile, low, high, 0, sums, padded_dim);
}

// All of it for keys [begin, end), which the tile holds.
template <int R, class AnyTile>
void attend_rows(const Rows &rows, const AnyTile &tile, int32_t begin, int32_t end, int head_dim, int padded_dim,
                 float softcap) {
    int lows[R], highs[R], low = kTileKeys, high = 0;
    for (int r = 0; r < R; ++r) {
        lows[r] = std::max(rows.first_keys[r], begin) - begin;
        highs[r] = std::min(rows.last_keys[r] + 1, end) - begin;
        if (lows[r] >= highs[r]) continue;
        low = std::min(low, lows[r]);
        high = std::max(high, highs[r]);
    }
    if (low >= high) return;
    const int first = low / Vec::kLanes, last = (high + Vec::kLanes - 1) / Vec::kLanes;
    score<R>(rows.queries, tile, first, last, head_dim, rows.weights);
    float worth[R];
    for (int r = 0; r < R; ++r) {
        worth[r] = soften(rows.weights + r * kTileKeys, first * Vec::kLanes, last * Vec::kLanes, lows[r], highs[r],
                          rows.hidden[r].of_tile(begin), softcap, rows.best + r, rows.totals + r * Vec::kLanes);
    }
    mix_tile<R>(rows.weights, worth, tile, low, high, rows.sums, padded_dim);
}

template <int R = kRows, class AnyTile>
void attend(const Rows &rows, const AnyTile &tile, int32_t begin, int32_t end, int head_dim, int padded_dim,
            float softcap) {
    if (rows.count == R) return attend_rows<R>(rows, tile, begin, end, head_dim, padded_dim, softcap);
    if constexpr (R > 1) attend<R - 1>(rows, tile, begin, end, head_dim, padded_dim, softcap);
}

}  // namespace wr
