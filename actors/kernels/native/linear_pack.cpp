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

int code_of(float value, float scale, int zero, int last) {
    return static_cast<int>(std::clamp(std::nearbyint(value / scale) + zero, 0.0f, static_cast<float>(last)));
}

// The scale for a group of values. 8 bits: the largest magnitude becomes 127. 4 bits: of a few scales around the one
// that makes the largest value -8, that with the least squared error.
float best_scale(const float *values, int32_t format) {
    float most = 0.0f;
    for (int k = 0; k < kGroup; ++k) {
        if (std::fabs(values[k]) > std::fabs(most)) most = values[k];
    }
    if (format == WR_Q8) return round_to_half(std::fabs(most) / 127.0f);
    float best = 0.0f, least = INFINITY;
    for (int step = -4; step <= 4; ++step) {
        const float scale = round_to_half(most / (-8.0f + 0.25f * static_cast<float>(step)));
        float error = 0.0f;
        for (int k = 0; k < kGroup && scale != 0.0f; ++k) {
            const float off = scale * static_cast<float>(code_of(values[k], scale, 8, 15) - 8) - values[k];
            error += off * off;
        }
        if (error < least) {
            least = error;
            best = scale;
        }
    }
    return best;
}

void pack_groups(const float *weight, int32_t format, Shape shape, int64_t panel, void *packed) {
    half_t *scales = panel_scales(packed, format, shape.in_features);
    for (int64_t g = 0; g < num_groups(shape.in_features); ++g) {
        uint8_t *codes = static_cast<uint8_t *>(packed) + g * group_bytes(format);
        for (int n = 0; n < kPanel; ++n) {
            float values[kGroup];
            uint8_t group[kGroup];
            for (int k = 0; k < kGroup; ++k) values[k] = element(weight, shape, panel * kPanel + n, g * kGroup + k);
            const float scale = best_scale(values, format);
            const int zero = format == WR_Q8 ? 128 : 8, last = format == WR_Q8 ? 255 : 15;
            for (int k = 0; k < kGroup; ++k) {
                group[k] = static_cast<uint8_t>(scale == 0.0f ? zero : code_of(values[k], scale, zero, last));
            }
            store_group(codes, format, n, group);
            scales[g * kPanel + n] = float_to_half(scale);
        }
    }
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
                    const half_t *at = scales + g * group_halves(weights.has_min) + n;
                    const int zero = weights.format == WR_Q8 ? 128 : 8;
                    row[k] = weights.has_min ? half_to_float(at[0]) * code + half_to_float(at[kPanel])
                                             : half_to_float(at[0]) * (code - zero);
                }
            }
        }
    }
}

}  // namespace
}  // namespace wr

extern "C" int64_t wr_packed_bytes(int32_t format, int32_t has_min, int64_t out_features, int64_t in_features) {
    return wr::num_panels(out_features) * wr::panel_bytes(format, has_min, in_features);
}

extern "C" void wr_pack(const float *weight, int32_t format, int64_t out_features, int64_t in_features, void *packed) {
    using namespace wr;
    const Shape shape{out_features, in_features};
    parallel_for(num_panels(out_features), 4, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            void *to = static_cast<uint8_t *>(packed) + panel * panel_bytes(format, 0, in_features);
            if (is_quantised(format)) {
                pack_groups(weight, format, shape, panel, to);
            } else {
                pack_values(weight, format, shape, panel, to);
            }
        }
    });
}

extern "C" void wr_unpack(const wr_weights *weights, float *out) {
    using namespace wr;
    parallel_for(num_panels(weights->out_features), 4, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            const int64_t bytes = panel_bytes(weights->format, weights->has_min, weights->in_features);
            unpack_panel(*weights, panel, static_cast<const uint8_t *>(weights->data) + panel * bytes, out);
        }
    });
}
