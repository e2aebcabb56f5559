// Linears over bfloat16 panels: the input is rounded to bfloat16 too, products and sums are float32.
#include <cstring>

#include "linear.h"

#if defined(__AVX512F__) && defined(__GNUC__)
#define WR_HAS_DOT 1
#define WR_DOT __attribute__((target("avx512bf16")))
#else
#define WR_HAS_DOT 0
#endif

namespace wr {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTilePanels = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 4, kTilePanels = 1;
#else
constexpr int kTileRows = 3, kTilePanels = 1;
#endif

int64_t num_pairs(int64_t in_features) { return (in_features + 1) / 2; }

#if WR_HAS_DOT
bool has_dot() {
    static const bool has = __builtin_cpu_supports("avx512bf16");
    return has;
}
#else
constexpr bool has_dot() { return false; }
#endif

inline uint32_t round_bits(uint32_t bits) {
    const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : rounded;
}

// A pair's two values, widened.
inline void widen(const uint32_t *pairs, Vec &first, Vec &second) {
#if defined(__AVX512F__)
    const __m512i bits = _mm512_loadu_si512(pairs);
    first.v = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    second.v = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
#elif defined(__AVX2__)
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(pairs));
    first.v = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    second.v = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
#else
    for (int lane = 0; lane < Vec::kLanes; ++lane) {
        first.v[lane] = bfloat_to_float(static_cast<half_t>(pairs[lane]));
        second.v[lane] = bfloat_to_float(static_cast<half_t>(pairs[lane] >> 16));
    }
#endif
}

// The rounded input is float32 here: [rows, pairs, 2]. The second of a pair is added first, as the instruction does.
template <int kRows, int kPanels>
void multiply_wide(const Block &block, const float *x, int panel, Pass pass) {
    constexpr int kVecs = kPanels * kPanelVecs;
    const int64_t pairs = num_pairs(block.weights->in_features);
    const uint32_t *weights = reinterpret_cast<const uint32_t *>(block.panel_at(block.panel + panel));
    const Ahead<kPanels> ahead(block, block.panel + panel, pass, pairs, 64);
    Vec sums[kRows][kVecs];
    for (auto &sum : sums) std::fill_n(sum, kVecs, set1(0.0f));
    for_steps(ahead, pairs, [&](int64_t k, const Ahead<kPanels> &ahead) {
        ahead.ask(k);
        Vec first[kVecs], second[kVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
            widen(weights + (v / kPanelVecs * pairs + k) * kPanel + v % kPanelVecs * Vec::kLanes, first[v], second[v]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            const float *at = x + 2 * ((pass.row + r) * pairs + k);
            const Vec x_first = set1(at[0]), x_second = set1(at[1]);
#pragma GCC unroll 8
            for (int v = 0; v < kVecs; ++v) sums[r][v] = fma(x_first, first[v], fma(x_second, second[v], sums[r][v]));
        }
    });
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPanels; ++p) block.write(pass.row + r, panel + p, &sums[r][p * kPanelVecs]);
    }
}

#if WR_HAS_DOT
template <int kRows, int kPanels>
WR_DOT void multiply_dot(const Block &block, const uint32_t *x, int panel, Pass pass) {
    const int64_t pairs = num_pairs(block.weights->in_features);
    const uint32_t *weights = reinterpret_cast<const uint32_t *>(block.panel_at(block.panel + panel));
    x += pass.row * pairs;
    const Ahead<kPanels> ahead(block, block.panel + panel, pass, pairs, 64);
    __m512 sums[kRows][kPanels];
    for (auto &sum : sums) std::fill_n(sum, kPanels, _mm512_setzero_ps());
    for_steps(ahead, pairs, [&](int64_t k, const Ahead<kPanels> &ahead) WR_DOT {
        ahead.ask(k);
        __m512i w[kPanels];
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) w[p] = _mm512_loadu_si512(weights + (p * pairs + k) * kPanel);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            const __m512i xs = _mm512_set1_epi32(static_cast<int>(x[r * pairs + k]));
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; ++p) sums[r][p] = _mm512_dpbf16_ps(sums[r][p], (__m512bh)xs, (__m512bh)w[p]);
        }
    });
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPanels; ++p) {
            const Vec sum{sums[r][p]};
            block.write(pass.row + r, panel + p, &sum);
        }
    }
}
#endif

template <int kPanels>
void multiply_panels(const Block &block, const Input &input, int panel) {
    const uint8_t *x =
        static_cast<const uint8_t *>(input.rounded) + block.row * rounded_row_bytes(block.weights->in_features);
    for_tiles<kTileRows>(block.rows, [&](auto height, Pass pass) {
#if WR_HAS_DOT
        if (has_dot()) {
            return multiply_dot<height(), kPanels>(block, reinterpret_cast<const uint32_t *>(x), panel, pass);
        }
#endif
        multiply_wide<height(), kPanels>(block, reinterpret_cast<const float *>(x), panel, pass);
    });
}

}  // namespace

int64_t rounded_row_bytes(int64_t in_features) { return num_pairs(in_features) * (has_dot() ? 4 : 8); }

void round_rows(const float *x, int64_t stride, int64_t begin, int64_t end, int64_t in_features, void *rounded) {
    const int64_t padded = 2 * num_pairs(in_features);
    for (int64_t row = begin; row < end; ++row) {
        const float *from = x + row * stride;
        if (has_dot()) {
            half_t *to = static_cast<half_t *>(rounded) + row * padded;
            for (int64_t k = 0; k < in_features; ++k) {
                uint32_t bits;
                std::memcpy(&bits, from + k, 4);
                to[k] = static_cast<half_t>(round_bits(bits) >> 16);
            }
            if (padded > in_features) to[in_features] = 0;
        } else {
            uint32_t *to = static_cast<uint32_t *>(rounded) + row * padded;
            for (int64_t k = 0; k < in_features; ++k) {
                uint32_t bits;
                std::memcpy(&bits, from + k, 4);
                to[k] = round_bits(bits) & 0xffff0000u;
            }
            if (padded > in_features) to[in_features] = 0;
        }
    }
}

void multiply_bfloat(const Block &block, const Input &input) {
    int panel = 0;
    for (; panel + kTilePanels <= block.panels; panel += kTilePanels) multiply_panels<kTilePanels>(block, input, panel);
    if constexpr (kTilePanels > 1) {
        if (panel < block.panels) multiply_panels<1>(block, input, panel);
    }
}

}  // namespace wr
