// GGUF blocks to panels, without requantising: codes move, scales stay (those of Q4_K are products, rounded to
// float16).
#include <cstring>

#include "linear.h"
#include "pool.h"

namespace wr {
namespace {

// The numbers of ggml's types.
enum { kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8, kQ4_K = 12 };

// One group of 32 as the panels hold it.
struct Group {
    uint8_t codes[kGroup];
    half_t scale;
    half_t minimum;
};

half_t read_half(const uint8_t *bytes) {
    half_t value;
    std::memcpy(&value, bytes, 2);
    return value;
}

// 16 bytes: low halves are elements 0 to 15, high halves 16 to 31.
void read_halves(const uint8_t *bytes, uint8_t *codes) {
    for (int i = 0; i < kGroup / 2; ++i) {
        codes[i] = bytes[i] & 15;
        codes[i + kGroup / 2] = bytes[i] >> 4;
    }
}

// A super-block of 256: scale and minimum (float16), 8 times a 6-bit scale and minimum in 12 bytes, then 4 times 32
// bytes whose low halves are one group and whose high halves are the next.
Group read_q4_k(const uint8_t *block, int64_t index) {
    const uint8_t *packed = block + 4;
    int scale, minimum;
    if (index < 4) {
        scale = packed[index] & 63;
        minimum = packed[index + 4] & 63;
    } else {
        scale = (packed[index + 4] & 15) | (packed[index - 4] >> 6) << 4;
        minimum = (packed[index + 4] >> 4) | (packed[index] >> 6) << 4;
    }
    Group group;
    group.scale = float_to_half(half_to_float(read_half(block)) * static_cast<float>(scale));
    group.minimum = float_to_half(-half_to_float(read_half(block + 2)) * static_cast<float>(minimum));
    const uint8_t *codes = block + 16 + index / 2 * kGroup;
    for (int i = 0; i < kGroup; ++i) group.codes[i] = index % 2 ? codes[i] >> 4 : codes[i] & 15;
    return group;
}

// Group g of a row.
Group read_group(const uint8_t *row, int32_t type, int64_t g) {
    Group group{};
    if (type == kQ4_K) return read_q4_k(row + g / 8 * 144, g % 8);
    const int64_t size = type == kQ8_0 ? 34 : type == kQ4_0 ? 18 : 20;
    const uint8_t *block = row + g * size;
    group.scale = read_half(block);
    if (type == kQ8_0) {
        for (int i = 0; i < kGroup; ++i) group.codes[i] = block[2 + i] ^ 0x80;
    } else if (type == kQ4_0) {
        read_halves(block + 2, group.codes);
    } else {
        group.minimum = read_half(block + 2);
        read_halves(block + 4, group.codes);
    }
    return group;
}

int64_t row_bytes(int32_t type, int64_t in_features) {
    if (type == kQ4_K) return in_features / 256 * 144;
    return num_groups(in_features) * (type == kQ8_0 ? 34 : type == kQ4_0 ? 18 : 20);
}

}  // namespace
}  // namespace wr

extern "C" int32_t wr_pack_gguf(const void *blocks, int32_t ggml_type, int64_t out_features, int64_t in_features,
                                void *packed) {
    using namespace wr;
    if (ggml_type != kQ4_0 && ggml_type != kQ4_1 && ggml_type != kQ8_0 && ggml_type != kQ4_K) return -1;
    const int32_t format = ggml_type == kQ8_0 ? WR_Q8 : WR_Q4;
    const int32_t offsets = ggml_type == kQ4_1 || ggml_type == kQ4_K ? WR_MINIMA : WR_NO_OFFSETS;
    const int64_t row_size = row_bytes(ggml_type, in_features);
    parallel_for(num_panels(out_features), 4, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            uint8_t *to = static_cast<uint8_t *>(packed) + panel * panel_bytes(format, offsets, in_features);
            half_t *scales = panel_scales(to, format, in_features);
            for (int64_t g = 0; g < num_groups(in_features); ++g) {
                for (int n = 0; n < kPanel; ++n) {
                    const int64_t row = panel * kPanel + n;
                    const uint8_t *from = static_cast<const uint8_t *>(blocks) + row * row_size;
                    const Group group = row < out_features ? read_group(from, ggml_type, g) : Group{};
                    store_group(to + g * group_bytes(format), format, n, group.codes);
                    half_t *at = scales + g * group_halves(offsets) + n;
                    at[0] = group.scale;
                    if (offsets == WR_MINIMA) at[kPanel] = group.minimum;
                }
            }
        }
    });
    return 0;
}
