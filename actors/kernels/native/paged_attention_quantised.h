// How quantised pages are read: as float32, tile by tile. Keys of blocks that tokens still join are read where they are
// in 16 bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kv_quantised.h"
#include "paged_attention_pages.h"
#include "paged_attention_quantised_rows.h"

namespace wr {

// One KV head's quantised pages of one sequence.
template <int32_t kKeyBits, int32_t kValueBits>
class QuantisedPages {
  public:
    static constexpr bool kHasOpenPages = true;

    QuantisedPages(const wr_kv_cache &cache, int32_t head, const int32_t *blocks)
        : cache_(cache),
          key_page_{kKeyBits, cache.head_dim, cache.block_size},
          value_page_{kValueBits, cache.head_dim, cache.block_size},
          head_(head),
          blocks_(blocks) {}

    // Floats that `view` needs room for: the scales and bases of a tile.
    static int64_t table_size(int32_t head_dim) {
        const ValuePage page{kValueBits, head_dim, 1};
        return 2 * (static_cast<int64_t>(kTileVectors) * head_dim + kTileKeys * page.groups());
    }

    // Whole vectors of codes lie in one page, and in one half of its bytes.
    bool direct() const {
        constexpr int32_t kSpan = kKeyBits == 8 && kValueBits == 8 ? Vec::kLanes : 2 * Vec::kLanes;
        return cache_.block_size % Vec::kLanes == 0 && cache_.head_dim % kSpan == 0;
    }

    // See Pages::view.
    QuantisedTile<kKeyBits, kValueBits> view(int32_t begin, int32_t end, float *tables, const QuantisedPages &next,
                                             int32_t next_begin, int32_t next_end) const {
        const int32_t head_dim = cache_.head_dim, groups = value_page_.groups();
        float *channels = tables, *value_scales = tables + 2 * kTileVectors * head_dim;
        QuantisedTile<kKeyBits, kValueBits> tile;
        tile.key_page = key_page_;
        tile.value_page = value_page_;
        tile.value_scales = value_scales;
        tile.value_bases = value_scales + kTileKeys * groups;
        for (int32_t key = begin, v = 0; key < end; key += Vec::kLanes, ++v) {
            const int32_t offset = key % cache_.block_size;
            const uint8_t *keys = key_bytes(key), *values = value_bytes(key);
            const int32_t next_key = std::min(next_begin + v * Vec::kLanes, std::max(next_begin, next_end - 1));
            tile.next_keys[v] = next.key_bytes(next_key);
            tile.next_values[v] = next.value_bytes(next_key) + next_key % cache_.block_size * value_page_.token_bytes();
            next.fetch_tables(next_key);
            if (v == 0 || offset == 0) {
                channels = tables + 2 * v * head_dim;
                channel_tables(keys, channels, channels + head_dim);
            }
            tile.keys[v] = keys + offset;
            tile.scales[v] = channels;
            tile.bases[v] = channels + head_dim;
            tile.values[v] = values + static_cast<int64_t>(offset) * value_page_.token_bytes();
            value_tables(values, offset * groups, Vec::kLanes * groups, value_scales + v * Vec::kLanes * groups,
                         value_scales + (kTileKeys + v * Vec::kLanes) * groups);
        }
        return tile;
    }

    // See Pages::copy. `limit`: keys before it are read later, so their pages are fetched on the way.
    Tile<Float32> copy(int32_t begin, int32_t end, float *keys, float *values, int32_t padded_dim,
                       float *tables, int32_t limit) const {
        each_block(begin, end, [&](int32_t key, int32_t offset, int32_t count) {
            const int32_t ahead = key + kTileKeys;
            if (ahead < limit) fetch(ahead);
            copy_keys(key_bytes(key), offset, count, keys + key - begin, tables);
            copy_values(value_bytes(key), offset, count, values + (key - begin) * padded_dim, padded_dim, tables);
        });
        return tile(keys, values, padded_dim);
    }

    // As `copy`, with keys of open pages. Blocks without one are seen by nobody: their keys are zero. Nor are keys before
    // `least`: they are left out.
    Tile<Float32> copy_open(int32_t begin, int32_t end, float *keys, float *values, int32_t padded_dim,
                            float *tables, int32_t least) const {
        each_block(std::max(begin, least), end, [&](int32_t key, int32_t offset, int32_t count) {
            copy_open_keys(cache_.open_pages[block(key)], offset, count, keys + key - begin);
            copy_values(value_bytes(key), offset, count, values + (key - begin) * padded_dim, padded_dim, tables);
        });
        return tile(keys, values, padded_dim);
    }

    int32_t block_begin(int32_t key) const { return key / cache_.block_size * cache_.block_size; }

  private:
    int64_t block(int32_t key) const { return blocks_[key / cache_.block_size]; }

    const uint8_t *key_bytes(int32_t key) const {
        return static_cast<const uint8_t *>(cache_.keys) +
               (block(key) * cache_.num_kv_heads + head_) * key_page_.bytes();
    }

    const uint8_t *value_bytes(int32_t key) const {
        return static_cast<const uint8_t *>(cache_.values) +
               (block(key) * cache_.num_kv_heads + head_) * value_page_.bytes();
    }

    template <class Body>
    void each_block(int32_t begin, int32_t end, Body body) const {
        for (int32_t key = begin; key < end;) {
            const int32_t offset = key % cache_.block_size, count = std::min(cache_.block_size - offset, end - key);
            body(key, offset, count);
            key += count;
        }
    }

    void fetch(int32_t key) const {
        const uint8_t *keys = key_bytes(key), *values = value_bytes(key);
        for (int64_t at = 0; at < key_page_.bytes(); at += 64) __builtin_prefetch(keys + at);
        for (int64_t at = 0; at < value_page_.bytes(); at += 64) __builtin_prefetch(values + at);
    }

    // scales[d], bases[d]: a key is its code times the one plus the other.
    void channel_tables(const uint8_t *page, float *scales, float *bases) const {
        const KeyUnits units(page + key_page_.units());
        decode<Code::kByte>(page + key_page_.scales(), cache_.head_dim, units.scale, 0.0f, scales);
        decode<Code::kByte>(page + key_page_.minima(), cache_.head_dim, units.minimum, units.lowest, bases);
    }

    // The same for `count` values' scales from the page's `first` on.
    void value_tables(const uint8_t *page, int32_t first, int32_t count, float *scales, float *bases) const {
        const uint8_t *from = page + value_page_.scales() + 2 * first, *zeros = page + value_page_.zeros() + first;
        const float part = 1.0f / value_page_.zero_parts();
        int32_t i = 0;
        for (; i + Vec::kLanes <= count; i += Vec::kLanes) {
            half_t bits[Vec::kLanes];  // a page may begin anywhere
            std::memcpy(bits, from + 2 * i, sizeof bits);
            const Vec scale = load_bfloat(bits);
            store(scales + i, scale);
            store(bases + i, (set1(0.0f) - scale) * (load_codes<Code::kByte>(zeros + i) * set1(part)));
        }
        for (; i < count; ++i) {
            half_t bit;
            std::memcpy(&bit, from + 2 * i, 2);
            scales[i] = bfloat_to_float(bit);
            bases[i] = -scales[i] * (zeros[i] * part);
        }
    }

    // The parts of a page that `view` reads.
    void fetch_tables(int32_t key) const {
        const uint8_t *keys = key_bytes(key);
        for (int64_t at = key_page_.scales(); at < key_page_.bytes(); at += 64) __builtin_prefetch(keys + at);
        __builtin_prefetch(value_bytes(key) + value_page_.scales());
    }

    // keys[d, k] of `count` tokens from `offset` on.
    void copy_keys(const uint8_t *page, int32_t offset, int32_t count, float *keys, float *tables) const {
        const int32_t head_dim = cache_.head_dim, half = key_page_.rows();
        float *scales = tables, *bases = tables + head_dim;
        channel_tables(page, scales, bases);
        for (int32_t d = 0; d < head_dim; ++d, keys += kTileKeys) {
            const uint8_t *codes = page + offset + static_cast<int64_t>(d < half ? d : d - half) * cache_.block_size;
            if constexpr (kKeyBits == 8) {
                decode<Code::kByte>(codes, count, scales[d], bases[d], keys);
            } else if (d < half) {
                decode<Code::kLow>(codes, count, scales[d], bases[d], keys);
            } else {
                decode<Code::kHigh>(codes, count, scales[d], bases[d], keys);
            }
        }
    }

    void copy_open_keys(int32_t open_page, int32_t offset, int32_t count, float *keys) const {
        const int32_t head_dim = cache_.head_dim, block_size = cache_.block_size;
        const int64_t page = (int64_t{open_page} * cache_.num_kv_heads + head_) * head_dim * block_size;
        const half_t *from = static_cast<const half_t *>(cache_.open_keys) + page + offset;
        for (int32_t d = 0; d < head_dim; ++d, keys += kTileKeys) {
            if (open_page < 0) {
                std::fill(keys, keys + count, 0.0f);
                continue;
            }
            const half_t *row = from + static_cast<int64_t>(d) * block_size;
            int32_t k = 0;
            for (; k + Vec::kLanes <= count; k += Vec::kLanes) store(keys + k, load_half(row + k));
            for (; k < count; ++k) keys[k] = half_to_float(row[k]);
        }
    }

    // values[k, d]
    void copy_values(const uint8_t *page, int32_t offset, int32_t count, float *values, int32_t padded_dim,
                     float *tables) const {
        const int32_t groups = value_page_.groups(), head_dim = cache_.head_dim, half = value_page_.token_bytes();
        float *scales = tables, *bases = tables + count * groups;
        value_tables(page, offset * groups, count * groups, scales, bases);
        const uint8_t *codes = page + static_cast<int64_t>(offset) * half;
        for (int32_t k = 0; k < count; ++k, values += padded_dim, codes += half) {
            for (int32_t group = 0; group < groups; ++group) {
                const float scale = scales[k * groups + group], base = bases[k * groups + group];
                const int32_t first = group * value_page_.group_size();
                const int32_t last = std::min(first + value_page_.group_size(), head_dim);
                if constexpr (kValueBits == 8) {
                    decode<Code::kByte>(codes + first, last - first, scale, base, values + first);
                } else {
                    const int32_t low_end = std::min(last, half), high = std::max(first, half);
                    decode<Code::kLow>(codes + first, low_end - first, scale, base, values + first);
                    decode<Code::kHigh>(codes + high - half, last - high, scale, base, values + high);
                }
            }
        }
    }

    static Tile<Float32> tile(float *keys, float *values, int32_t padded_dim) {
        Tile<Float32> tile;
        tile.key_stride = kTileKeys;
        tile.value_stride = padded_dim;
        for (int32_t v = 0; v < kTileVectors; ++v) {
            tile.keys[v] = tile.next_keys[v] = keys + v * Vec::kLanes;
            tile.values[v] = tile.next_values[v] = values + v * Vec::kLanes * padded_dim;
        }
        return tile;
    }

    const wr_kv_cache &cache_;
    const KeyPage key_page_;
    const ValuePage value_page_;
    const int64_t head_;
    const int32_t *blocks_;
};

}  // namespace wr
