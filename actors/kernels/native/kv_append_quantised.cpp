// Stores a step's keys and values in quantised pages.
//
// A block's keys are kept in 16 bits too while tokens join it (its open page), and the block is quantised from there
// again with every token: so its bytes follow from its tokens alone, not from the steps in which they came.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kv_quantised.h"
#include "pool.h"
#include "simd.h"
#include "warmroot.h"

namespace wr {
namespace {

// Pages to a piece: fewer are not worth waking a thread.
constexpr int64_t kGrain = 8;

// Tokens that follow each other in one block.
struct Run {
    int64_t row, block;
    int32_t offset, count;
};

std::vector<Run> find_runs(const int64_t *slots, int64_t rows, int32_t block_size) {
    std::vector<Run> runs;
    for (int64_t row = 0; row < rows;) {
        const int64_t block = slots[row] / block_size;
        const auto offset = static_cast<int32_t>(slots[row] % block_size);
        int32_t count = 1;
        while (row + count < rows && offset + count < block_size && slots[row + count] == slots[row] + count) ++count;
        runs.push_back({row, block, offset, count});
        row += count;
    }
    return runs;
}

// The smallest bfloat16 that is not below.
half_t bfloat_above(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<half_t>((bits + 0xffff) >> 16);
}

uint8_t to_code(float value, float most) { return static_cast<uint8_t>(std::max(0.0f, std::min(value, most))); }

struct Range {
    float least, largest;
};

// Of `count` elements; there is room behind them for a whole vector.
Range range_of(float *x, int32_t count) {
    const int32_t end = (count + Vec::kLanes - 1) / Vec::kLanes * Vec::kLanes;
    std::fill(x + count, x + end, x[0]);
    Vec least = load(x), largest = least;
    for (int32_t i = Vec::kLanes; i < end; i += Vec::kLanes) {
        least = min(least, load(x + i));
        largest = max(largest, load(x + i));
    }
    return {-reduce_max(set1(0.0f) - least), reduce_max(largest)};
}

// codes[i] = round((x[i] - base) * inverse), of `count` elements of as many vectors as range_of needs.
void encode(const float *x, int32_t count, float inverse, float base, float most, uint8_t *codes) {
    float rounded[Vec::kLanes];
    const Vec inverses = set1(inverse), bases = set1(base);
    for (int32_t i = 0; i < count; i += Vec::kLanes) {
        store(rounded, max(min(round((load(x + i) - bases) * inverses), set1(most)), set1(0.0f)));
        const int32_t lanes = std::min(Vec::kLanes, count - i);
        for (int32_t lane = 0; lane < lanes; ++lane) codes[i + lane] = static_cast<uint8_t>(rounded[lane]);
    }
}

// Memory of one head's page at work.
struct Workspace {
    int32_t padded;     // floats in a row: vectors
    float *keys;        // [head_dim, padded]
    Range *ranges;      // [head_dim]
    uint8_t *codes;     // [head_dim, block_size]

    Workspace(int32_t head_dim, int32_t block_size) : padded((block_size + Vec::kLanes) / Vec::kLanes * Vec::kLanes) {
        const int64_t floats = static_cast<int64_t>(head_dim) * padded;
        keys = static_cast<float *>(scratch(Scratch::kAppend, floats * sizeof(float) + head_dim * sizeof(Range) +
                                                                  static_cast<int64_t>(head_dim) * block_size));
        ranges = reinterpret_cast<Range *>(keys + floats);
        codes = reinterpret_cast<uint8_t *>(ranges + head_dim);
    }
};

// The first `count` tokens of an open page [head_dim, block_size] into a page of codes.
void quantise_keys(const half_t *open, int32_t count, const KeyPage &layout, uint8_t *page) {
    const int32_t head_dim = layout.head_dim, block_size = layout.block_size;
    const float most = layout.bits == 8 ? 255.0f : 15.0f;
    const Workspace work(head_dim, block_size);
    float lowest = INFINITY, highest = -INFINITY;  // of the channels' minima
    for (int32_t d = 0; d < head_dim; ++d) {
        float *row = work.keys + static_cast<int64_t>(d) * work.padded;
        const half_t *from = open + static_cast<int64_t>(d) * block_size;
        int32_t t = 0;
        for (; t + Vec::kLanes <= count; t += Vec::kLanes) store(row + t, load_half(from + t));
        for (; t < count; ++t) row[t] = half_to_float(from[t]);
        work.ranges[d] = range_of(row, count);
        lowest = std::min(lowest, work.ranges[d].least);
        highest = std::max(highest, work.ranges[d].least);
    }
    const half_t minimum_unit = bfloat_above((highest - lowest) / 255.0f);
    const float minimum = bfloat_to_float(minimum_unit);
    float widest = 0.0f;
    for (int32_t d = 0; d < head_dim; ++d) {
        const float steps = minimum > 0.0f ? std::floor((work.ranges[d].least - lowest) / minimum) : 0.0f;
        page[layout.minima() + d] = to_code(steps, 255.0f);
        work.ranges[d].least = lowest + minimum * page[layout.minima() + d];
        widest = std::max(widest, (work.ranges[d].largest - work.ranges[d].least) / most);
    }
    const half_t scale_unit = bfloat_above(widest / 255.0f);
    const float unit = bfloat_to_float(scale_unit);
    for (int32_t d = 0; d < head_dim; ++d) {
        const float scale = (work.ranges[d].largest - work.ranges[d].least) / most;
        const uint8_t steps = unit > 0.0f ? to_code(std::ceil(scale / unit), 255.0f) : 0;
        page[layout.scales() + d] = steps;
        uint8_t *codes = work.codes + static_cast<int64_t>(d) * block_size;
        encode(work.keys + static_cast<int64_t>(d) * work.padded, count, steps > 0 ? 1.0f / (unit * steps) : 0.0f,
               work.ranges[d].least, most, codes);
        std::fill(codes + count, codes + block_size, uint8_t{0});
    }
    std::memcpy(page + layout.units(), &lowest, 4);
    std::memcpy(page + layout.units() + 4, &scale_unit, 2);
    std::memcpy(page + layout.units() + 6, &minimum_unit, 2);
    if (layout.bits == 8) {
        std::copy(work.codes, work.codes + layout.scales(), page);
        return;
    }
    const int64_t size = layout.scales(), high = static_cast<int64_t>(head_dim / 2) * block_size;
    for (int64_t i = 0; i < size; ++i) {
        page[i] = static_cast<uint8_t>(work.codes[i] | (i < high ? work.codes[size + i] << 4 : 0));
    }
}

// One token's values [head_dim].
void quantise_values(const float *values, int32_t offset, const ValuePage &layout, uint8_t *page) {
    const float most = layout.bits == 8 ? 255.0f : 15.0f, parts = layout.zero_parts();
    const int32_t head_dim = layout.head_dim, groups = layout.groups();
    const Workspace work(1, head_dim);
    std::copy(values, values + head_dim, work.keys);
    for (int32_t group = 0; group < groups; ++group) {
        const int32_t begin = group * layout.group_size(), end = std::min(begin + layout.group_size(), head_dim);
        float least = 0.0f, largest = 0.0f;
        for (int32_t d = begin; d < end; ++d) {
            least = std::min(least, values[d]);
            largest = std::max(largest, values[d]);
        }
        const half_t rounded = bfloat_above((largest - least) / most);
        const float scale = bfloat_to_float(rounded), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        const uint8_t zero = to_code(std::nearbyint(-least * inverse * parts), 255.0f);
        const int64_t at = static_cast<int64_t>(offset) * groups + group;
        std::memcpy(page + layout.scales() + 2 * at, &rounded, 2);
        page[layout.zeros() + at] = zero;
        encode(work.keys + begin, end - begin, inverse, -scale * (zero / parts), most, work.codes + begin);
    }
    uint8_t *to = page + static_cast<int64_t>(offset) * layout.token_bytes();
    if (layout.bits == 8) {
        std::copy(work.codes, work.codes + head_dim, to);
        return;
    }
    const int32_t size = layout.token_bytes();
    for (int32_t i = 0; i < size; ++i) {
        to[i] = static_cast<uint8_t>(work.codes[i] | (i < head_dim / 2 ? work.codes[size + i] << 4 : 0));
    }
}

void append(const float *keys, const float *values, int64_t stride, const Run &run, int32_t head,
            const wr_kv_cache &cache) {
    const int32_t head_dim = cache.head_dim, block_size = cache.block_size;
    const KeyPage key_page{key_bits(cache), head_dim, block_size};
    const ValuePage value_page{value_bits(cache), head_dim, block_size};
    const int64_t page = run.block * cache.num_kv_heads + head;
    const int64_t open_page = int64_t{cache.open_pages[run.block]} * cache.num_kv_heads + head;
    half_t *open = static_cast<half_t *>(cache.open_keys) + open_page * head_dim * block_size;
    const int64_t at = run.row * stride + static_cast<int64_t>(head) * head_dim;
    for (int32_t d = 0; d < head_dim; ++d) {
        for (int32_t t = 0; t < run.count; ++t) {
            open[d * block_size + run.offset + t] = float_to_half(keys[at + t * stride + d]);
        }
    }
    quantise_keys(open, run.offset + run.count, key_page,
                  static_cast<uint8_t *>(cache.keys) + page * key_page.bytes());
    uint8_t *to = static_cast<uint8_t *>(cache.values) + page * value_page.bytes();
    for (int32_t t = 0; t < run.count; ++t) quantise_values(values + at + t * stride, run.offset + t, value_page, to);
}

}  // namespace

void append_quantised(const float *keys, const float *values, int64_t stride, int64_t rows, const wr_kv_cache &cache,
                      const int64_t *slots) {
    const std::vector<Run> runs = find_runs(slots, rows, cache.block_size);
    const int64_t count = static_cast<int64_t>(runs.size()) * cache.num_kv_heads;
    // Pieces are runs and heads, not tokens: a page is written by one thread.
    parallel_for(count, std::max<int64_t>(grain_for(count, 1), kGrain), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            append(keys, values, stride, runs[i / cache.num_kv_heads], static_cast<int32_t>(i % cache.num_kv_heads),
                   cache);
        }
    });
}

}  // namespace wr

