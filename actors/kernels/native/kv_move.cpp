// Moves tokens of a tree to the places of the sequence that they turned out to be.
#include <algorithm>
#include <cstdint>

#include "warmroot.h"

namespace {

struct Place {
    int64_t block;
    int64_t offset;
};

template <typename Element>
void move_token(const wr_kv_cache &cache, Place from, Place to) {
    const int64_t size = cache.block_size, head_dim = cache.head_dim, page = head_dim * size;
    auto *keys = static_cast<Element *>(cache.keys), *values = static_cast<Element *>(cache.values);
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
        const int64_t from_page = (from.block * cache.num_kv_heads + head) * page;
        const int64_t to_page = (to.block * cache.num_kv_heads + head) * page;
        if (keys != nullptr) {
            const Element *source = keys + from_page + from.offset;
            Element *destination = keys + to_page + to.offset;
            for (int64_t d = 0; d < head_dim; ++d) destination[d * size] = source[d * size];
        }
        std::copy_n(values + from_page + from.offset * head_dim, head_dim, values + to_page + to.offset * head_dim);
    }
}

}  // namespace

extern "C" void wr_kv_move(const wr_kv_cache *caches, int64_t num_caches, const int64_t *sources,
                           const int64_t *destinations, int64_t count) {
    for (const wr_kv_cache *cache = caches; cache < caches + num_caches; ++cache) {
        const int64_t size = cache->block_size;
        for (int64_t i = 0; i < count; ++i) {
            const Place from{sources[i] / size, sources[i] % size}, to{destinations[i] / size, destinations[i] % size};
            if (cache->format == WR_F32) {
                move_token<uint32_t>(*cache, from, to);
            } else {
                move_token<uint16_t>(*cache, from, to);
            }
        }
    }
}
