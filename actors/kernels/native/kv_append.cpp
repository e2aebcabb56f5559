// Stores a step's keys and values in their pages.
#include <algorithm>
#include <cstdint>

#include "kv_quantised.h"
#include "pool.h"
#include "simd.h"
#include "warmroot.h"

namespace wr {
namespace {

// Tokens to a piece. A multiple of a page, so that two threads seldom write to one.
constexpr int64_t kGrain = 64;

template <int32_t kFormat, typename Element>
Element convert_to(float value) {
    if constexpr (kFormat == WR_F16) return float_to_half(value);
    if constexpr (kFormat == WR_BF16) return float_to_bfloat(value);
    return static_cast<Element>(value);
}

// Tokens that follow each other in one page are stored together: a dimension of all of them is one line of memory.
template <int32_t kFormat, typename Element>
void store_keys(const float *from, int64_t stride, int64_t count, int32_t head_dim, Element *page, int32_t block_size) {
    for (int32_t d = 0; d < head_dim; ++d) {
        for (int64_t t = 0; t < count; ++t) {
            page[static_cast<int64_t>(d) * block_size + t] = convert_to<kFormat, Element>(from[t * stride + d]);
        }
    }
}

template <int32_t kFormat, typename Element>
void append(const float *keys, const float *values, int64_t stride, int64_t begin, int64_t end,
            const wr_kv_cache &cache, const int64_t *slots) {
    const int32_t head_dim = cache.head_dim, block_size = cache.block_size;
    for (int64_t row = begin; row < end;) {
        const int64_t block = slots[row] / block_size, offset = slots[row] % block_size;
        int64_t count = 1;
        while (row + count < end && offset + count < block_size && slots[row + count] == slots[row] + count) ++count;
        for (int32_t head = 0; head < cache.num_kv_heads; ++head) {
            const int64_t page = (block * cache.num_kv_heads + head) * head_dim * block_size;
            const int64_t at = row * stride + static_cast<int64_t>(head) * head_dim;
            if (cache.keys != nullptr) {
                store_keys<kFormat>(keys + at, stride, count, head_dim,
                                    static_cast<Element *>(cache.keys) + page + offset, block_size);
            }
            Element *to = static_cast<Element *>(cache.values) + page + offset * head_dim;
            for (int64_t t = 0; t < count; ++t) {
                for (int32_t d = 0; d < head_dim; ++d) {
                    to[t * head_dim + d] = convert_to<kFormat, Element>(values[at + t * stride + d]);
                }
            }
        }
        row += count;
    }
}

}  // namespace
}  // namespace wr

extern "C" void wr_kv_append(const float *keys, const float *values, int64_t stride, int64_t rows,
                             const wr_kv_cache *cache, const int64_t *slots) {
    if (cache->format >= WR_KV_INT8) return wr::append_quantised(keys, values, stride, rows, *cache, slots);
    wr::parallel_for(rows, wr::kGrain, [&](int64_t begin, int64_t end) {
        switch (cache->format) {
            case WR_F32:
                return wr::append<WR_F32, float>(keys, values, stride, begin, end, *cache, slots);
            case WR_F16:
                return wr::append<WR_F16, wr::half_t>(keys, values, stride, begin, end, *cache, slots);
            case WR_BF16:
                return wr::append<WR_BF16, wr::half_t>(keys, values, stride, begin, end, *cache, slots);
        }
    });
}
