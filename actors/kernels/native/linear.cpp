// y (+)= x * W^T + b over packed weights: prepares the input once, then deals out blocks of panels and rows.
#include <cstddef>

#include "linear.h"
#include "pool.h"

namespace wr {
namespace {

// Rows that one piece of work covers, so that its input stays in the second-level cache while panels pass by.
constexpr int64_t kBlockRows = 192;

// Below this many values, the input is prepared by the caller alone: waking the others takes longer.
constexpr int64_t kAloneValues = 1 << 15;

int64_t num_units(const wr_weights &part) { return (num_panels(part.out_features) + kUnit - 1) / kUnit; }

template <typename F>
void for_rows(int64_t rows, int64_t in_features, F &&body) {
    const int64_t least = std::max<int64_t>(1, kAloneValues / std::max<int64_t>(in_features, 1));
    parallel_for(rows, grain_for(rows, least, 2), body);
}

Input prepare(const wr_weights *parts, int32_t num_parts, const float *x, int64_t stride, int64_t rows) {
    const int64_t in_features = parts[0].in_features;
    bool quantised = false, rounded = false;
    for (int32_t i = 0; i < num_parts; ++i) {
        quantised |= is_quantised(parts[i].format);
        rounded |= parts[i].format == WR_BF16;
    }
    const size_t groups_bytes = quantised ? rows * num_groups(in_features) * sizeof(InputGroup) : 0;
    const size_t start = (groups_bytes + 63) / 64 * 64;
    const size_t bytes = start + (rounded ? rows * rounded_row_bytes(in_features) : 0);
    uint8_t *memory = bytes ? static_cast<uint8_t *>(scratch(Scratch::kLinear, bytes)) : nullptr;
    InputGroup *groups = reinterpret_cast<InputGroup *>(memory);
    if (quantised) {
        for_rows(rows, in_features, [&](int64_t begin, int64_t end) {
            quantise_rows(x, stride, begin, end, in_features, groups);
        });
    }
    if (rounded) {
        for_rows(rows, in_features, [&](int64_t begin, int64_t end) {
            round_rows(x, stride, begin, end, in_features, memory + start);
        });
    }
    return {x, stride, groups, memory + start};
}

void multiply(const Block &block, const Input &input) {
    if (is_quantised(block.weights->format)) {
        multiply_quantised(block, input);
    } else if (block.weights->format == WR_BF16) {
        multiply_bfloat(block, input);
    } else {
        multiply_float(block, input);
    }
}

}  // namespace
}  // namespace wr

extern "C" void wr_linear(const wr_weights *parts, int32_t num_parts, const float *x, int64_t x_stride, float *y,
                          int64_t y_stride, int64_t rows, int32_t accumulate) {
    using namespace wr;
    if (rows <= 0 || num_parts <= 0) return;
    const Input input = prepare(parts, num_parts, x, x_stride, rows);
    int64_t units = 0;
    for (int32_t i = 0; i < num_parts; ++i) units += num_units(parts[i]);
    const int64_t row_blocks = (rows + kBlockRows - 1) / kBlockRows;
    const int64_t block_rows = (rows + row_blocks - 1) / row_blocks;
    parallel_for(units * row_blocks, grain_for(units * row_blocks, 1), [&](int64_t begin, int64_t end) {
        for (int64_t index = begin; index < end; ++index) {
            const int64_t row = index / units * block_rows;
            int64_t unit = index % units;
            const wr_weights *part = parts;
            float *out = y;
            while (unit >= num_units(*part)) {
                unit -= num_units(*part);
                out += part->out_features;
                ++part;
            }
            const int64_t panel = unit * kUnit;
            const int panels = static_cast<int>(std::min<int64_t>(kUnit, num_panels(part->out_features) - panel));
            const int64_t height = std::min(block_rows, rows - row);
            multiply({part, panel, panels, row, height, out, y_stride, accumulate != 0}, input);
        }
    });
}
