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

float round_to_half(float value) { return half_to_float(float_to_half(value)); }

// Codes of values at a scale, and what scale would have suited these codes best.
struct Fit {
    float error;
    float refit;
};

Vec code_of(Vec values, Vec inverse) { return min(max(round(values * inverse), set1(-8.0f)), set1(7.0f)); }

// The sum of squared errors of 4-bit codes at `scale`, and the scale with the least error for those codes.
Fit fit_scale(const float *values, int64_t count, float scale) {
    const Vec inverse = set1(1.0f / scale);
    Vec error = set1(0.0f), products = error, squares = error;
    for (int64_t k = 0; k < count; k += Vec::kLanes) {
        const Vec value = load(values + k), code = code_of(value, inverse);
        const Vec off = fma(code, set1(-scale), value);
        error = fma(off, off, error);
        products = fma(code, value, products);
        squares = fma(code, code, squares);
    }
    const float square = reduce_add(squares);
    return {reduce_add(error), square > 0.0f ? reduce_add(products) / square : scale};
}

// The scale for a group of values. 8 bits: the largest magnitude becomes 127. 4 bits: the best of some scales around
// the one that makes the largest value -8, each tried again after the codes that it gives have had a say.
float best_scale(const float *values, int64_t count, int32_t format) {
    float most = 0.0f;
    for (int64_t k = 0; k < count; ++k) {
        if (std::fabs(values[k]) > std::fabs(most)) most = values[k];
    }
    if (format == WR_Q8) return round_to_half(std::fabs(most) / 127.0f);
    float best = 0.0f, least = INFINITY;
    const auto consider = [&](float scale) {
        scale = round_to_half(scale);
        if (scale == 0.0f) return scale;
        const Fit fit = fit_scale(values, count, scale);
        if (fit.error < least) {
            least = fit.error;
            best = scale;
        }
        return fit.refit;
    };
    for (int step = -6; step <= 6; ++step) {
        consider(consider(most / (-8.0f + 0.3f * static_cast<float>(step))));
    }
    return best;
}

uint8_t quantise(float value, float scale, int32_t format) {
    const float code = scale == 0.0f ? 0.0f : std::nearbyint(value / scale);
    const int zero = middle(format);
    return static_cast<uint8_t>(static_cast<int>(std::clamp(code, -float(zero), float(zero - 1))) + zero);
}

void pack_groups(const float *weight, int32_t format, int64_t group, Shape shape, int64_t panel, void *packed) {
    half_t *scales = panel_scales(packed, format, shape.in_features);
    for (int n = 0; n < kPanel; ++n) {
        const int64_t row = panel * kPanel + n;
        const float *values = row < shape.out_features ? weight + row * shape.in_features : nullptr;
        float scale = 0.0f;
        for (int64_t g = 0; g < num_groups(shape.in_features); ++g) {
            const int64_t first = g * kGroup;
            if (values && first % group == 0) {
                scale = best_scale(values + first, std::min(group, shape.in_features - first), format);
            }
            uint8_t codes[kGroup];
            for (int k = 0; k < kGroup; ++k) codes[k] = quantise(values ? values[first + k] : 0.0f, scale, format);
            store_group(static_cast<uint8_t *>(packed) + g * group_bytes(format), format, n, codes);
            scales[g * kPanel + n] = float_to_half(scale);
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
            void *to = static_cast<uint8_t *>(packed) + panel * panel_bytes(format, WR_NO_OFFSETS, in_features);
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
