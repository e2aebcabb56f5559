// How pages are read: one format for each type of their elements, and tiles of keys that the kernel works on.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"
#include "warmroot.h"

namespace wr {

constexpr int kTileKeys = 64;
constexpr int kTileVectors = kTileKeys / Vec::kLanes;

struct Float32 {
    using Element = float;
    static Vec load(const float *p) { return wr::load(p); }
    static float value(float x) { return x; }
};

struct Float16 {
    using Element = half_t;
    static Vec load(const half_t *p) { return load_half(p); }
    static float value(half_t x) { return half_to_float(x); }
};

struct BFloat16 {
    using Element = half_t;
    static Vec load(const half_t *p) { return load_bfloat(p); }
    static float value(half_t x) { return bfloat_to_float(x); }
};

// Some keys and their values, a vector of keys at a time. Vector v holds keys [v * kLanes, (v + 1) * kLanes): dimension d
// of all of them at keys[v] + d * key_stride, the value of the k-th at values[v] + k * value_stride. The same places of
// the next tile are fetched on the way: its pages lie anywhere, which no hardware foresees.
template <class Format>
struct Tile {
    const typename Format::Element *keys[kTileVectors];
    const typename Format::Element *values[kTileVectors];
    const typename Format::Element *next_keys[kTileVectors];
    const typename Format::Element *next_values[kTileVectors];
    int64_t key_stride;
    int64_t value_stride;
};

// One KV head's pages of one sequence.
template <class Format>
class Pages {
  public:
    using Element = typename Format::Element;
    static constexpr bool kHasOpenPages = false;
    static int64_t table_size(int32_t) { return 0; }

    Pages(const wr_kv_cache &cache, int32_t head, const int32_t *blocks)
        : keys_(static_cast<const Element *>(cache.keys)),
          values_(static_cast<const Element *>(cache.values)),
          head_(head),
          num_heads_(cache.num_kv_heads),
          head_dim_(cache.head_dim),
          block_size_(cache.block_size),
          blocks_(blocks) {}

    // Whole vectors lie in one page, so a tile may point into the pages. Not where keys have to be turned.
    bool direct() const {
        return keys_ != nullptr && block_size_ % Vec::kLanes == 0 && head_dim_ % Vec::kLanes == 0;
    }

    // Keys [begin, end) as they lie in the pages; begin is a multiple of a tile's keys. `next` holds the keys
    // [next_begin, next_end) that are read after these.
    Tile<Format> view(int32_t begin, int32_t end, const Pages &next, int32_t next_begin, int32_t next_end) const {
        Tile<Format> tile;
        tile.key_stride = block_size_;
        tile.value_stride = head_dim_;
        for (int32_t key = begin, v = 0; key < end; key += Vec::kLanes, ++v) {
            locate(key, tile.keys[v], tile.values[v]);
            const int32_t next_key = next_begin + v * Vec::kLanes;
            next.locate(next_key < next_end ? next_key : next_begin, tile.next_keys[v], tile.next_values[v]);
        }
        return tile;
    }

    // The same as float32 in `keys` [head_dim, kTileKeys] and `values` [kTileKeys, padded_dim].
    Tile<Float32> copy(int32_t begin, int32_t end, float *keys, float *values, int32_t padded_dim) const {
        for (int32_t key = begin; key < end;) {
            const int32_t offset = key % block_size_, count = std::min(block_size_ - offset, end - key);
            const Element *from_values = page(values_, key) + static_cast<int64_t>(offset) * head_dim_;
            for (int32_t k = 0; k < count; ++k) {
                convert(from_values + k * head_dim_, head_dim_, values + (key - begin + k) * padded_dim);
            }
            if (keys_ != nullptr) {
                const Element *from_keys = page(keys_, key) + offset;
                for (int32_t d = 0; d < head_dim_; ++d) {
                    convert(from_keys + static_cast<int64_t>(d) * block_size_, count,
                            keys + d * kTileKeys + key - begin);
                }
            }
            key += count;
        }
        if (keys_ == nullptr) turn(values, end - begin, padded_dim, keys);
        Tile<Float32> tile;
        tile.key_stride = kTileKeys;
        tile.value_stride = padded_dim;
        for (int32_t v = 0; v < kTileVectors; ++v) {
            tile.keys[v] = tile.next_keys[v] = keys + v * Vec::kLanes;
            tile.values[v] = tile.next_values[v] = values + v * Vec::kLanes * padded_dim;
        }
        return tile;
    }

  private:
    const Element *page(const Element *pages, int32_t key) const {
        const int64_t block = blocks_[key / block_size_];
        return pages + (block * num_heads_ + head_) * block_size_ * head_dim_;
    }

    void locate(int32_t key, const Element *&keys, const Element *&values) const {
        const int32_t offset = key % block_size_;
        keys = page(keys_, key) + offset;
        values = page(values_, key) + static_cast<int64_t>(offset) * head_dim_;
    }

    // keys[d, k] = values[k, d], in squares that stay in the first cache.
    void turn(const float *values, int32_t count, int32_t padded_dim, float *keys) const {
        constexpr int32_t kSquare = 16;
        for (int32_t d0 = 0; d0 < head_dim_; d0 += kSquare) {
            const int32_t d1 = std::min(d0 + kSquare, head_dim_);
            for (int32_t k0 = 0; k0 < count; k0 += kSquare) {
                const int32_t k1 = std::min(k0 + kSquare, count);
                for (int32_t d = d0; d < d1; ++d) {
                    for (int32_t k = k0; k < k1; ++k) keys[d * kTileKeys + k] = values[k * padded_dim + d];
                }
            }
        }
    }

    static void convert(const Element *from, int32_t count, float *to) {
        int32_t i = 0;
        for (; i + Vec::kLanes <= count; i += Vec::kLanes) store(to + i, Format::load(from + i));
        for (; i < count; ++i) to[i] = Format::value(from[i]);
    }

    const Element *keys_;
    const Element *values_;
    int64_t head_;
    int64_t num_heads_;
    int32_t head_dim_;
    int32_t block_size_;
    const int32_t *blocks_;
};

}  // namespace wr
