// y (+)= x * W^T + b over packed weights: prepares the input once, then deals out blocks of panels and rows.
#include <array>
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

// Parts of one call; kMostParts at a time.
constexpr int32_t kMostParts = 4;
using Inputs = std::array<Input, kMostParts>;

enum class Form { kPlain, kRounded, kQuantised };

Form form_of(const wr_weights &part) {
    if (is_quantised(part.format)) return Form::kQuantised;
    return part.format == WR_BF16 ? Form::kRounded : Form::kPlain;
}

// The first of the parts that read the input in the form in which part i does.
int32_t first_alike(const wr_weights *parts, int32_t i) {
    int32_t first = 0;
    while (form_of(parts[first]) != form_of(parts[i]) || parts[first].order != parts[i].order) ++first;
    return first;
}

size_t form_bytes(const wr_weights &part, int64_t rows) {
    switch (form_of(part)) {
        case Form::kQuantised:
            return rows * num_groups(part.in_features) * sizeof(InputGroup);
        case Form::kRounded:
            return rows * rounded_row_bytes(part.in_features);
        default:
            return 0;
    }
}

void make_form(const wr_weights &part, const float *x, int64_t stride, int64_t rows, void *to) {
    const Form form = form_of(part);
    if (form == Form::kPlain) return;
    for_rows(rows, part.in_features, [&](int64_t begin, int64_t end) {
        if (form == Form::kQuantised) {
            quantise_rows(x, stride, begin, end, part, static_cast<InputGroup *>(to));
        } else {
            round_rows(x, stride, begin, end, part.in_features, to);
        }
    });
}

// What each part reads.
Inputs prepare(const wr_weights *parts, int32_t num_parts, const float *x, int64_t stride, int64_t rows) {
    std::array<size_t, kMostParts> starts{};
    size_t bytes = 0;
    for (int32_t i = 0; i < num_parts; ++i) {
        const int32_t first = first_alike(parts, i);
        starts[i] = first < i ? starts[first] : bytes;
        if (first == i) bytes += (form_bytes(parts[i], rows) + 63) / 64 * 64;
    }
    uint8_t *memory = bytes ? static_cast<uint8_t *>(scratch(Scratch::kLinear, bytes)) : nullptr;
    Inputs inputs{};
    for (int32_t i = 0; i < num_parts; ++i) {
        uint8_t *form = memory + starts[i];
        if (first_alike(parts, i) == i) make_form(parts[i], x, stride, rows, form);
        inputs[i] = {x, stride, reinterpret_cast<InputGroup *>(form), form};
    }
    return inputs;
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
    if (rows <= 0) return;
    for (; num_parts > kMostParts; num_parts -= kMostParts) {
        wr_linear(parts, kMostParts, x, x_stride, y, y_stride, rows, accumulate);
        for (const wr_weights *last = parts + kMostParts; parts < last; ++parts) y += parts->out_features;
    }
    if (num_parts <= 0) return;
    const Inputs inputs = prepare(parts, num_parts, x, x_stride, rows);
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
            multiply({part, panel, panels, row, height, out, y_stride, accumulate != 0},
                     inputs[part - parts]);
        }
    });
}
