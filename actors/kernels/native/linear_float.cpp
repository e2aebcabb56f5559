// Linears over float32 and float16 panels: float32 products and sums.
#include <type_traits>

#include "linear.h"

namespace wr {
namespace {

// Rows of a tile, as many as leave the sums in registers: 12 x 2 panels in the 32 registers of AVX-512, 6 x 1 panel in
// the 16 of AVX2.
#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTilePanels = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTilePanels = 1;
#else
constexpr int kTileRows = 3, kTilePanels = 1;
#endif

inline Vec load_weights(const float *p) { return load(p); }
inline Vec load_weights(const half_t *p) { return load_half(p); }

// Each row and feature has one sum that walks the input features in order, whatever the tile: a row's result does not
// depend on its company.
template <int kRows, int kPanels, typename T>
void multiply_tile(const Block &block, const Input &input, int panel, Pass pass) {
    constexpr int kVecs = kPanels * kPanelVecs;
    const int64_t in_features = block.weights->in_features;
    const T *weights = reinterpret_cast<const T *>(block.panel_at(block.panel + panel));
    const float *x = input.x + (block.row + pass.row) * input.stride;
    const Ahead<kPanels> ahead(block, block.panel + panel, pass, in_features, kPanel * sizeof(T));
    Vec sums[kRows][kVecs];
    for (auto &sum : sums) std::fill_n(sum, kVecs, set1(0.0f));
    for_steps(ahead, in_features, [&](int64_t k, const Ahead<kPanels> &ahead) {
        ahead.ask(k);
        Vec w[kVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
            w[v] = load_weights(weights + (v / kPanelVecs * in_features + k) * kPanel + v % kPanelVecs * Vec::kLanes);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            const Vec xs = set1(x[r * input.stride + k]);
#pragma GCC unroll 8
            for (int v = 0; v < kVecs; ++v) sums[r][v] = fma(xs, w[v], sums[r][v]);
        }
    });
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPanels; ++p) block.write(pass.row + r, panel + p, &sums[r][p * kPanelVecs]);
    }
}

template <int kPanels, typename T>
void multiply_panels(const Block &block, const Input &input, int panel) {
    for_tiles<kTileRows>(block.rows, [&](auto height, Pass pass) {
        multiply_tile<height(), kPanels, T>(block, input, panel, pass);
    });
}

template <typename T>
void multiply_typed(const Block &block, const Input &input) {
    int panel = 0;
    for (; panel + kTilePanels <= block.panels; panel += kTilePanels) {
        multiply_panels<kTilePanels, T>(block, input, panel);
    }
    if constexpr (kTilePanels > 1) {
        if (panel < block.panels) multiply_panels<1, T>(block, input, panel);
    }
}

}  // namespace

void multiply_float(const Block &block, const Input &input) {
    if (block.weights->format == WR_F32) {
        multiply_typed<float>(block, input);
    } else {
        multiply_typed<half_t>(block, input);
    }
}

}  // namespace wr
