// What the files of the packed linears share: the layout of the panels, the forms that an input takes, and the kernels.
//
// A weight is cut into panels of 16 output features, the last one filled up with zeros, so that a vector register (or
// two, or four) holds what one input feature contributes to a panel. Within a panel:
//   F32, F16  16 values for each input feature
//   BF16      16 pairs for each two input features, the first feature in the lower half; odd counts end with zeros
//   Q8, Q4    the codes of all groups, then for each group 16 float16 scales and, with offsets, 16 float16 minima or
//             zeros. Codes are unsigned: w = scale * code + minimum or scale * (code - zero), zero being 128 for Q8 and
//             8 for Q4 where groups have none of their own. A quad is 4 input features of 16 outputs, output after output. Q8: the 8 quads
//             of a group; Q4: 4 times 64 bytes with quad q in the low and quad q + 4 in the high halves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "simd.h"
#include "warmroot.h"

namespace wr {

constexpr int kPanel = 16;  // output features of a panel
constexpr int kGroup = 32;  // input features that share a scale
constexpr int kQuads = kGroup / 4;
constexpr int kPanelVecs = kPanel / Vec::kLanes;

// Panels that are worked on together. Two share what is read of the input.
constexpr int kUnit = 2;

inline bool is_quantised(int32_t format) { return format == WR_Q8 || format == WR_Q4; }

inline int64_t num_panels(int64_t out_features) { return (out_features + kPanel - 1) / kPanel; }

inline int64_t num_groups(int64_t in_features) { return in_features / kGroup; }

inline int64_t group_bytes(int32_t format) { return format == WR_Q4 ? kGroup * kPanel / 2 : kGroup * kPanel; }

// float16 values per group: the scales, and the minima or zeros if there are any.
inline int64_t group_halves(int32_t offsets) { return offsets == WR_NO_OFFSETS ? kPanel : 2 * kPanel; }

// The zero of groups without one of their own.
inline int middle(int32_t format) { return format == WR_Q8 ? 128 : 8; }

inline int64_t panel_bytes(int32_t format, int32_t offsets, int64_t in_features) {
    switch (format) {
        case WR_F32:
            return in_features * kPanel * 4;
        case WR_F16:
            return in_features * kPanel * 2;
        case WR_BF16:
            return (in_features + 1) / 2 * kPanel * 4;
        default: {
            const int64_t bytes = num_groups(in_features) * (group_bytes(format) + 2 * group_halves(offsets));
            return (bytes + 63) / 64 * 64;
        }
    }
}

inline half_t *panel_scales(void *panel, int32_t format, int64_t in_features) {
    return reinterpret_cast<half_t *>(static_cast<uint8_t *>(panel) + num_groups(in_features) * group_bytes(format));
}

inline const half_t *panel_scales(const void *panel, int32_t format, int64_t in_features) {
    return panel_scales(const_cast<void *>(panel), format, in_features);
}

// The codes of one output and group, in the order of the input features, to and from their places among the panel's.
inline void store_group(uint8_t *codes, int32_t format, int n, const uint8_t *group) {
    for (int k = 0; k < kGroup; ++k) {
        if (format == WR_Q8) {
            codes[k / 4 * 64 + 4 * n + k % 4] = group[k];
        } else if (k < kGroup / 2) {
            codes[k / 4 * 64 + 4 * n + k % 4] = static_cast<uint8_t>(group[k] | group[k + kGroup / 2] << 4);
        }
    }
}

inline int load_code(const uint8_t *codes, int32_t format, int n, int64_t k) {
    if (format == WR_Q8) return codes[k / 4 * 64 + 4 * n + k % 4];
    const int64_t low = k % (kGroup / 2);
    return codes[low / 4 * 64 + 4 * n + low % 4] >> (k < kGroup / 2 ? 0 : 4) & 15;
}

// One group of a quantised input row: x = scale * code.
struct InputGroup {
    int8_t codes[kGroup];
    float scale;
    float scaled_sum;      // scale * sum of the codes
    int32_t negative_sum;  // - sum of the codes
    float negative_total;  // the same
};

// The rows of an input in the forms that a part needs.
struct Input {
    const float *x;
    int64_t stride;
    const InputGroup *quantised;  // [rows, groups], in the part's order
    const void *rounded;          // [rows, rounded_row_bytes]: bfloat16, see linear_bfloat.cpp
};

// y[rows, panels * 16] of a call, at most kUnit panels wide.
struct Block {
    const wr_weights *weights;
    int64_t panel;
    int panels;
    int64_t row;
    int64_t rows;
    float *y;  // first row, first feature of the part
    int64_t y_stride;
    bool accumulate;

    const uint8_t *data() const { return panel_at(panel); }

    const uint8_t *panel_at(int64_t index) const {
        return static_cast<const uint8_t *>(weights->data) +
               index * panel_bytes(weights->format, weights->offsets, weights->in_features);
    }

    // Finish row `r` of panel `p` of this block: bias, residual, and no more features than there are.
    void write(int64_t r, int p, const Vec *sums) const {
        const int64_t first = (panel + p) * kPanel;
        float *out = y + (row + r) * y_stride + first;
        for (int v = 0; v < kPanelVecs; ++v) {
            const int64_t start = first + v * Vec::kLanes;
            const int count = static_cast<int>(std::clamp<int64_t>(weights->out_features - start, 0, Vec::kLanes));
            if (count == Vec::kLanes) {
                Vec sum = sums[v];
                if (weights->bias) sum = sum + load(weights->bias + start);
                if (accumulate) sum = sum + load(out + v * Vec::kLanes);
                store(out + v * Vec::kLanes, sum);
            } else if (count > 0) {
                Vec sum = sums[v];
                if (weights->bias) sum = sum + load(weights->bias + start, count);
                if (accumulate) sum = sum + load(out + v * Vec::kLanes, count);
                store(out + v * Vec::kLanes, sum, count);
            }
        }
    }
};

// linear_float.cpp: F32 and F16.
void multiply_float(const Block &block, const Input &input);

// linear_bfloat.cpp
int64_t rounded_row_bytes(int64_t in_features);
void round_rows(const float *x, int64_t stride, int64_t begin, int64_t end, int64_t in_features, void *rounded);
void multiply_bfloat(const Block &block, const Input &input);

// linear_quantised.cpp: Q8 and Q4.
void quantise_rows(const float *x, int64_t stride, int64_t begin, int64_t end, const wr_weights &weights,
                   InputGroup *groups);
void multiply_quantised(const Block &block, const Input &input);

// A tile of a block: its first row, and which of the passes over the same weights it is.
struct Pass {
    int64_t row;
    int64_t index;
    int64_t count;
};

// Weights are asked for before they are needed, some at each step of a tile. The hardware's own prefetch stops at every
// page and starts anew in every panel. A single pass over the weights asks for what it needs itself a little later; of
// several passes, each asks for its share of the next panels, so that memory works while the sums are made. With few
// rows this makes up to twice the throughput. To ask beyond the end of a weight does no harm.
template <int kPanels>
class Ahead {
  public:
    // For kPanels panels from `panel` on, of each of which `step_bytes` are used at each of `steps` steps.
    Ahead(const Block &block, int64_t panel, Pass pass, int64_t steps, int64_t step_bytes) {
        constexpr int64_t kDistance = 4096;
        panel_bytes_ = block.panel_at(1) - block.panel_at(0);
        step_bytes_ = (step_bytes + pass.count - 1) / pass.count;
        if (pass.count == 1) {
            at_ = block.panel_at(panel) + kDistance;
            turn_ = std::max<int64_t>(0, steps - kDistance / step_bytes);
        } else {
            at_ = block.panel_at(panel + kPanels) + pass.index * steps * step_bytes_;
            turn_ = steps;
        }
    }

    // The step from which a single pass would ask for the neighbour of its panel: go on with the panel after both.
    int64_t turn() const { return turn_; }
    void go_on() { at_ += (kPanels - 1) * panel_bytes_; }

    // For steps of at most a line.
    void ask(int64_t step) const {
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) __builtin_prefetch(at_ + p * panel_bytes_ + step * step_bytes_);
    }

    void ask_lines(int64_t step) const {
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
            const uint8_t *first = at_ + p * panel_bytes_ + step * step_bytes_;
            for (int64_t byte = 0; byte < step_bytes_; byte += 64) __builtin_prefetch(first + byte);
        }
    }

  private:
    const uint8_t *at_;
    int64_t panel_bytes_;
    int64_t step_bytes_;
    int64_t turn_;
};

// Call body(step, ahead) for each of a tile's steps.
template <int kPanels, typename F>
inline __attribute__((always_inline)) void for_steps(Ahead<kPanels> ahead, int64_t steps, F &&body) {
    int64_t step = 0;
    for (const int64_t end : {ahead.turn(), steps}) {
        for (; step < end; ++step) body(step, ahead);
        ahead.go_on();
    }
}

// Call tile(std::integral_constant<int, n>, pass) for tiles of n <= kMost rows that together are `rows`. Tiles are of
// nearly equal height: 13 rows are 7 and 6, not 12 and 1.
template <int kMost, typename F>
void for_tiles(int64_t rows, F &&tile) {
    const auto call = [&]<int kRows>(auto &&self, std::integral_constant<int, kRows> height, int64_t n, Pass pass) {
        if (n == kRows) {
            tile(height, pass);
        } else if constexpr (kRows > 1) {
            self(self, std::integral_constant<int, kRows - 1>{}, n, pass);
        }
    };
    Pass pass{0, 0, (rows + kMost - 1) / kMost};
    for (; pass.index < pass.count; ++pass.index) {
        const int64_t left = pass.count - pass.index;
        const int64_t height = (rows - pass.row + left - 1) / left;
        call(call, std::integral_constant<int, kMost>{}, height, pass);
        pass.row += height;
    }
}

}  // namespace wr
