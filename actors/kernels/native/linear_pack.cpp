// From float32 weights to panels, and back. The layout is described in linear.h.
#include <cmath>

#include "linear.h"
#include "pool.h"

namespace wr {
namespace {

struct Shape {
    int64_t out_features;
    int64_t in_features;
};

// Element k of output n of a panel, zero outside the weight.
float element(const float *weight, Shape shape, int64_t n, int64_t k) {
    return n < shape.out_features && k < shape.in_features ? weight[n * shape.in_features + k] : 0.0f;
}

void pack_values(const float *weight, int32_t format, Shape shape, int64_t panel, void *packed) {
    const int64_t pairs = format == WR_BF16 ? 2 : 1;
    const int64_t padded = (shape.in_features + pairs - 1) / pairs * pairs;
    for (int64_t n = 0; n < kPanel; ++n) {
        for (int64_t k = 0; k < padded; ++k) {
            const float value = element(weight, shape, panel * kPanel + n, k);
            const int64_t at = k / pairs * kPanel * pairs + n * pairs + k % pairs;
            if (format == WR_F32) {
                static_cast<float *>(packed)[at] = value;
            } else {
                static_cast<half_t *>(packed)[at] = format == WR_F16 ? float_to_half(value) : float_to_bfloat(value);
            }
        }
    }
}

// What packing makes: 4 bits with zeros, 8 bits around the middle.
int32_t made_offsets(int32_t format) { return format == WR_Q4 ? WR_ZEROS : WR_NO_OFFSETS; }

float round_to_half(float value) { return half_to_float(float_to_half(value)); }

// The values that a group's codes stand for: scale * (code - zero).
struct Grid {
    float scale;
    int zero;
};

// How well a grid suits values, and the scale that would suit the codes that they get best.
struct Fit {
    float error;  // sum of squares
    float refit;
};

Fit fit_grid(const float *values, int64_t count, Grid grid) {
    const Vec inverse = set1(1.0f / grid.scale), first = set1(-float(grid.zero)), last = set1(float(15 - grid.zero));
    Vec error = set1(0.0f), products = error, squares = error;
    for (int64_t k = 0; k < count; k += Vec::kLanes) {
        const Vec value = load(values + k), code = min(max(round(value * inverse), first), last);
        const Vec off = fma(code, set1(-grid.scale), value);
        error = fma(off, off, error);
        products = fma(code, value, products);
        squares = fma(code, code, squares);
    }
    const float square = reduce_add(squares);
    return {reduce_add(error), square > 0.0f ? reduce_add(products) / square : grid.scale};
}

// 4 bits: of the grids over some shares of the range of the values, each tried again with the scale that suits the
// codes that it gives, the one with the least squared error.
Grid best_grid(const float *values, int64_t count) {
    constexpr int kShares = 12;
    const auto [low, high] = std::minmax_element(values, values + count);
    const float lowest = std::min(*low, 0.0f), width = std::max(*high, 0.0f) - lowest;
    Grid best{0.0f, middle(WR_Q4)};
    float least = INFINITY;
    for (int step = 0; step < kShares; ++step) {
        const float share = 1.0f - 0.04f * static_cast<float>(step);
        Grid grid{round_to_half(share * width / 15.0f), 0};
        for (int turn = 0; turn < 2 && grid.scale > 0.0f; ++turn) {
            if (turn == 0) {
                grid.zero = static_cast<int>(std::clamp(std::nearbyint(-share * lowest / grid.scale), 0.0f, 15.0f));
            }
            const Fit fit = fit_grid(values, count, grid);
            if (fit.error < least) {
                least = fit.error;
                best = grid;
            }
            grid.scale = round_to_half(fit.refit);
        }
    }
    return best;
}

// 8 bits: the largest magnitude becomes 127.
Grid widest_grid(const float *values, int64_t count) {
    float most = 0.0f;
    for (int64_t k = 0; k < count; ++k) most = std::max(most, std::fabs(values[k]));
    return {round_to_half(most / 127.0f), middle(WR_Q8)};
}

uint8_t quantise(float value, Grid grid, int last) {
    const float code = grid.scale == 0.0f ? 0.0f : std::nearbyint(value / grid.scale);
    return static_cast<uint8_t>(std::clamp(code + float(grid.zero), 0.0f, float(last)));
}

void pack_groups(const float *weight, int32_t format, int64_t group, Shape shape, int64_t panel, void *packed) {
    const int last = format == WR_Q8 ? 255 : 15;
    const int64_t halves = group_halves(made_offsets(format));
    half_t *scales = panel_scales(packed, format, shape.in_features);
    for (int n = 0; n < kPanel; ++n) {
        const int64_t row = panel * kPanel + n;
        if (row >= shape.out_features) break;  // zeros already: with a scale of 0 no code counts
        const float *values = weight + row * shape.in_features;
        Grid grid{};
        for (int64_t g = 0; g < num_groups(shape.in_features); ++g) {
            const int64_t first = g * kGroup;
            if (first % group == 0) {
                const int64_t count = std::min(group, shape.in_features - first);
                grid = format == WR_Q8 ? widest_grid(values + first, count) : best_grid(values + first, count);
            }
            uint8_t codes[kGroup];
            for (int k = 0; k < kGroup; ++k) codes[k] = quantise(values[first + k], grid, last);
            store_group(static_cast<uint8_t *>(packed) + g * group_bytes(format), format, n, codes);
            scales[g * halves + n] = float_to_half(grid.scale);
            if (halves > kPanel) scales[g * halves + kPanel + n] = float_to_half(static_cast<float>(grid.zero));
        }
    }
}

// Quantised weights as somebody else has made them, row after row.
struct Codes {
    const uint8_t *codes;
    const uint16_t *scales;
    const uint8_t *zeros;
};

void pack_codes(Codes from, int32_t format, Shape shape, int64_t panel, void *packed) {
    const int32_t offsets = from.zeros ? WR_ZEROS : WR_NO_OFFSETS;
    const int64_t groups = num_groups(shape.in_features);
    half_t *scales = panel_scales(packed, format, shape.in_features);
    for (int n = 0; n < kPanel; ++n) {
        const int64_t row = panel * kPanel + n;
        if (row >= shape.out_features) break;  // zeros already: with a scale of 0 no code counts
        for (int64_t g = 0; g < groups; ++g) {
            uint8_t *to = static_cast<uint8_t *>(packed) + g * group_bytes(format);
            store_group(to, format, n, from.codes + row * shape.in_features + g * kGroup);
            half_t *at = scales + g * group_halves(offsets) + n;
            at[0] = from.scales[row * groups + g];
            if (from.zeros) at[kPanel] = float_to_half(from.zeros[row * groups + g]);
        }
    }
}

float offset_value(float scale, float offset, int32_t offsets, int code) {
    return offsets == WR_MINIMA ? scale * code + offset : scale * (code - offset);
}

void unpack_panel(const wr_weights &weights, int64_t panel, const uint8_t *data, float *out) {
    const int64_t in_features = weights.in_features;
    const half_t *scales = panel_scales(data, weights.format, in_features);
    const int64_t count = std::min<int64_t>(kPanel, weights.out_features - panel * kPanel);
    for (int n = 0; n < count; ++n) {
        float *row = out + (panel * kPanel + n) * in_features;
        for (int64_t k = 0; k < in_features; ++k) {
            switch (weights.format) {
                case WR_F32:
                    row[k] = reinterpret_cast<const float *>(data)[k * kPanel + n];
                    break;
                case WR_F16:
                    row[k] = half_to_float(reinterpret_cast<const half_t *>(data)[k * kPanel + n]);
                    break;
                case WR_BF16:
                    row[k] = bfloat_to_float(
                        reinterpret_cast<const half_t *>(data)[k / 2 * 2 * kPanel + 2 * n + k % 2]);
                    break;
                default: {
                    const int64_t g = k / kGroup;
                    const int code =
                        load_code(data + g * group_bytes(weights.format), weights.format, n, k % kGroup);
                    const half_t *at = scales + g * group_halves(weights.offsets) + n;
                    const float offset =
                        weights.offsets ? half_to_float(at[kPanel]) : static_cast<float>(middle(weights.format));
                    row[k] = offset_value(half_to_float(at[0]), offset, weights.offsets, code);
                }
            }
        }
    }
}

}  // namespace
}  // namespace wr

extern "C" int64_t wr_packed_bytes(int32_t format, int32_t offsets, int64_t out_features, int64_t in_features) {
    return wr::num_panels(out_features) * wr::panel_bytes(format, offsets, in_features);
}

extern "C" void wr_pack(const float *weight, int32_t format, int64_t group, int64_t out_features, int64_t in_features,
                        void *packed) {
    using namespace wr;
    const Shape shape{out_features, in_features};
    parallel_for(num_panels(out_features), 4, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            void *to = static_cast<uint8_t *>(packed) + panel * panel_bytes(format, made_offsets(format), in_features);
            if (is_quantised(format)) {
                pack_groups(weight, format, group, shape, panel, to);
            } else {
                pack_values(weight, format, shape, panel, to);
            }
        }
    });
}

extern "C" void wr_pack_codes(const uint8_t *codes, const uint16_t *scales, const uint8_t *zeros, int32_t format,
                              int64_t out_features, int64_t in_features, void *packed) {
    using namespace wr;
    const int64_t bytes = panel_bytes(format, zeros ? WR_ZEROS : WR_NO_OFFSETS, in_features);
    parallel_for(num_panels(out_features), 4, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            pack_codes({codes, scales, zeros}, format, {out_features, in_features}, panel,
                       static_cast<uint8_t *>(packed) + panel * bytes);
        }
    });
}

extern "C" void wr_unpack(const wr_weights *weights, float *out) {
    using namespace wr;
    parallel_for(num_panels(weights->out_features), 4, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            const int64_t bytes = panel_bytes(weights->format, weights->offsets, weights->in_features);
            unpack_panel(*weights, panel, static_cast<const uint8_t *>(weights->data) + panel * bytes, out);
        }
    });
}
