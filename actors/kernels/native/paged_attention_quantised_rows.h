// A few rows over one tile of quantised keys as they lie in their pages: codes become floats in registers, by the same
// operations as in QuantisedPages::copy, so that a row's result is the same bits either way.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kv_quantised.h"
#include "paged_attention_rows.h"

namespace wr {

// See Tile. Vector v holds keys [v * kLanes, (v + 1) * kLanes), which lie in one page.
template <int32_t kKeyBits, int32_t kValueBits>
struct QuantisedTile {
    const uint8_t *keys[kTileVectors];    // codes of these tokens in the first dimension
    const float *scales[kTileVectors];    // [head_dim] of their block's channels
    const float *bases[kTileVectors];     // [head_dim]
    const uint8_t *values[kTileVectors];  // codes of the first of these tokens
    const uint8_t *next_keys[kTileVectors];
    const uint8_t *next_values[kTileVectors];
    const float *value_scales;            // [kTileKeys, groups]
    const float *value_bases;             // [kTileKeys, groups]
    KeyPage key_page;
    ValuePage value_page;
};

// sums[row, vector] += query * key for dimensions [d, end), whose codes begin in the row d - skipped of the pages.
template <Code kCode, int R, int V, class QuantisedTile>
void add_scores(const float *queries, const QuantisedTile &tile, int first, int d, int end, int skipped,
                Vec (&sums)[R][V]) {
    const int64_t stride = tile.key_page.block_size;
    const uint8_t *codes[V];
    const float *scales[V], *bases[V];
    for (int v = 0; v < V; ++v) {
        codes[v] = tile.keys[first + v] + (d - skipped) * stride;
        scales[v] = tile.scales[first + v];
        bases[v] = tile.bases[first + v];
    }
    queries += d * R;
    const uint8_t *const *next = tile.next_keys + first;
    for (int64_t at = 0; d < end; ++d, at += stride, queries += R) {
        // A dimension of one vector is part of a cache line: the vectors take turns.
        __builtin_prefetch(next[d % V] + (d - skipped) / V * 64);
        Vec key[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) key[v] = fma(load_codes<kCode>(codes[v] + at), set1(scales[v][d]), set1(bases[v][d]));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec query = set1(queries[r]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] = fma(query, key[v], sums[r][v]);
        }
    }
}

template <int R, int V, int32_t kKeyBits, int32_t kValueBits>
void score_vectors(const float *queries, const QuantisedTile<kKeyBits, kValueBits> &tile, int first, int head_dim,
                   float *scores) {
    Vec sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[r][v] = set1(0.0f);
    }
    if constexpr (kKeyBits == 8) {
        add_scores<Code::kByte, R, V>(queries, tile, first, 0, head_dim, 0, sums);
    } else {
        const int half = tile.key_page.rows();
        add_scores<Code::kLow, R, V>(queries, tile, first, 0, half, 0, sums);
        add_scores<Code::kHigh, R, V>(queries, tile, first, half, head_dim, half, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(scores + r * kTileKeys + (first + v) * Vec::kLanes, sums[r][v]);
    }
}

// See mix_vectors of plain tiles: V vectors from dimension d on, whose codes begin at d - skipped of a token's.
template <Code kCode, int R, int V, class QuantisedTile>
void mix_codes(const float *weights, const float *worth, const QuantisedTile &tile, int low, int high, int d,
               int skipped, float *sums, int padded_dim) {
    Vec mixed[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const Vec scale = set1(worth[r]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) mixed[r][v] = load(sums + r * padded_dim + d + v * Vec::kLanes) * scale;
    }
    const int64_t stride = tile.value_page.token_bytes();
    const int groups = tile.value_page.groups(), group = d / tile.value_page.group_size();
    for (int key = low; key < high;) {
        const int vector = key / Vec::kLanes, end = std::min((vector + 1) * Vec::kLanes, high);
        const int64_t at = (key % Vec::kLanes) * stride + d - skipped;
        const uint8_t *codes = tile.values[vector] + at, *next = tile.next_values[vector] + at;
        for (; key < end; ++key, codes += stride, next += stride) {
            __builtin_prefetch(next);
            const Vec scale = set1(tile.value_scales[key * groups + group]);
            const Vec base = set1(tile.value_bases[key * groups + group]);
            Vec value[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) value[v] = fma(load_codes<kCode>(codes + v * Vec::kLanes), scale, base);
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

template <Code kCode, int R, int V, class QuantisedTile>
void mix_span(const float *weights, const float *worth, const QuantisedTile &tile, int low, int high, int d, int end,
              int skipped, float *sums, int padded_dim) {
    for (; d + V * Vec::kLanes <= end; d += V * Vec::kLanes) {
        mix_codes<kCode, R, V>(weights, worth, tile, low, high, d, skipped, sums, padded_dim);
    }
    if constexpr (V > 1) {
        mix_span<kCode, R, V - 1>(weights, worth, tile, low, high, d, end, skipped, sums, padded_dim);
    }
}

// In spans of one group and one half of the codes' bytes.
template <int R, int32_t kKeyBits, int32_t kValueBits>
void mix_tile(const float *weights, const float *worth, const QuantisedTile<kKeyBits, kValueBits> &tile, int low,
              int high, float *sums, int padded_dim) {
    const int half = tile.value_page.token_bytes(), size = tile.value_page.group_size();
    for (int d = 0, end; d < padded_dim; d = end) {
        end = std::min((d / size + 1) * size, padded_dim);
        if constexpr (kValueBits == 8) {
            mix_span<Code::kByte, R, kVectors>(weights, worth, tile, low, high, d, end, 0, sums, padded_dim);
        } else if (d < half) {
            end = std::min(end, half);
            mix_span<Code::kLow, R, kVectors>(weights, worth, tile, low, high, d, end, 0, sums, padded_dim);
        } else {
            mix_span<Code::kHigh, R, kVectors>(weights, worth, tile, low, high, d, end, half, sums, padded_dim);
        }
    }
}

}  // namespace wr
