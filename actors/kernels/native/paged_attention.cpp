// Causal attention over a paged cache, for decodes, prompts and chunks alike. See attention_plan.cpp for how a step is
// cut into items; here an item is computed, and the parts of rows that several items share are merged.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention_plan.h"
#include "paged_attention_pages.h"
#include "paged_attention_quantised.h"
#include "paged_attention_rows.h"
#include "pool.h"
#include "simd.h"
#include "warmroot.h"

namespace wr {
namespace {

// Below this, in multiplications, waking other threads costs more than they save.
constexpr int64_t kSerialWork = 50000;

int32_t round_up(int64_t value, int64_t multiple) {
    return static_cast<int32_t>((value + multiple - 1) / multiple * multiple);
}

struct Call {
    const wr_attention_plan *plan;
    const float *queries;
    int64_t q_stride;
    const wr_kv_cache *cache;
    float scale;
    float softcap;
    float *out;
    int64_t out_stride;
    float *partials;  // [num_partials, num_heads, partial_size]: weighted sum, largest score, sum of weights

    int32_t head_dim() const { return plan->head_dim; }
    int32_t group() const { return plan->num_heads / plan->num_kv_heads; }
    int32_t padded_dim() const { return round_up(head_dim(), Vec::kLanes); }
    int32_t partial_size() const { return round_up(padded_dim() + 2, 16); }
    float *partial(int32_t index, int32_t head) const {
        return partials + (static_cast<int64_t>(index) * plan->num_heads + head) * partial_size();
    }
};

// The calling thread's memory, cut into arrays that begin at cache lines.
class Arena {
  public:
    explicit Arena(char *memory) : memory_(memory) {}

    template <typename T>
    T *take(int64_t count) {
        T *array = reinterpret_cast<T *>(memory_ + used_);
        used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return array;
    }

    int64_t used() const { return used_; }

  private:
    char *memory_;
    int64_t used_ = 0;
};

// What a row has of some keys: the weighted sum of their values, the largest score, the sum of the weights.
struct Seen {
    float *sums;
    float best;
    float total;
};

// Adds further keys. Runs are added one after the other in this very way wherever they were computed, so that a row's
// result is the same bits in a decode as in a prompt.
Seen plus(const Seen &before, const Seen &more, int32_t padded_dim) {
    if (more.best == -INFINITY) return before;
    if (before.best == -INFINITY) {
        std::copy(more.sums, more.sums + padded_dim, before.sums);
        return {before.sums, more.best, more.total};
    }
    const float best = std::max(before.best, more.best);
    const Vec former = exp(set1(before.best - best)), worth = exp(set1(more.best - best));
    for (int32_t d = 0; d < padded_dim; d += Vec::kLanes) {
        store(before.sums + d, fma(load(more.sums + d), worth, load(before.sums + d) * former));
    }
    float total[Vec::kLanes];
    store(total, fma(set1(more.total), worth, set1(before.total) * former));
    return {before.sums, best, total[0]};
}

// One item and KV head at work. Rows are ordered by query, then head, and cut into even groups of at most kRows.
template <class Pages>
class Worker {
  public:
    // `next_item` and `next_head` are what the thread does after this.
    Worker(const Call &call, const AttentionItem &item, int32_t kv_head, const AttentionItem &next_item,
           int32_t next_head)
        : call_(call),
          item_(item),
          first_head_(kv_head * call.group()),
          num_rows_(item.num_queries * call.group()),
          num_groups_((num_rows_ + kRows - 1) / kRows),
          padded_dim_(call.padded_dim()),
          pages_(*call.cache, kv_head, blocks(call, item)),
          next_item_(next_item),
          next_pages_(*call.cache, next_head, blocks(call, next_item)) {
        Arena sizes(nullptr);
        take_arrays(sizes);
        Arena arena(static_cast<char *>(scratch(Scratch::kAttentionPiece, sizes.used())));
        take_arrays(arena);
    }

    void run() {
        for (int32_t group = 0; group < num_groups_; ++group) load_queries(group);
        for (begin_key_ = item_.begin_key; begin_key_ < item_.end_key; begin_key_ = end_key_) {
            end_key_ = std::min(next_run(begin_key_), item_.end_key);
            attend_run();
            if (has_runs()) add_run();
        }
        for (int32_t row = 0; row < num_rows_; ++row) finish(row, has_runs() ? whole_[row] : seen(row));
    }

  private:
    bool has_runs() const { return next_run(item_.begin_key) < item_.end_key; }

    void attend_run() {
        std::fill(best_, best_ + num_rows_, -INFINITY);
        std::fill(totals_, totals_ + num_rows_ * Vec::kLanes, 0.0f);
        std::fill(sums_, sums_ + num_rows_ * padded_dim_, 0.0f);
        for (int32_t row = 0; row < num_rows_; ++row) {
            first_keys_[row] = std::max(query(row).first_key, begin_key_);
            last_keys_[row] = query(row).last_key;
        }
        if constexpr (Pages::kHasOpenPages) {
            attend_before_own_blocks();
            attend_own_blocks();
        } else {
            attend_all_keys();
        }
    }

    Seen seen(int32_t row) const {
        return {sums_ + row * padded_dim_, best_[row], reduce_add(load(totals_ + row * Vec::kLanes))};
    }

    void add_run() {
        for (int32_t row = 0; row < num_rows_; ++row) {
            if (begin_key_ == item_.begin_key) whole_[row] = {whole_sums_ + row * padded_dim_, -INFINITY, 0.0f};
            whole_[row] = plus(whole_[row], seen(row), padded_dim_);
        }
    }

    static const int32_t *blocks(const Call &call, const AttentionItem &item) {
        return call.plan->block_table + item.sequence * call.plan->table_stride;
    }

    // Tiles begin at multiples of their size, so that a row adds up its keys in the same order in every item.
    static int32_t tile_begin(int32_t key) { return key / kTileKeys * kTileKeys; }

    void attend_all_keys() {
        const int32_t next_tile = tile_begin(next_item_.begin_key);
        // Few rows read a page hardly more than once; many have it converted for them.
        const bool direct = pages_.direct() && num_groups_ <= 2;
        for (int32_t begin = tile_begin(begin_key_); begin < end_key_; begin += kTileKeys) {
            const int32_t end = std::min(begin + kTileKeys, end_key_);
            if (direct && end < end_key_) {
                attend_tile(pages_.view(begin, end, pages_, end, end_key_), begin, end);
            } else if (direct) {
                attend_tile(pages_.view(begin, end, next_pages_, next_tile, next_item_.end_key), begin, end);
            } else {
                attend_tile(pages_.copy(begin, end, keys_, values_, padded_dim_), begin, end);
            }
        }
    }

    // A query sees the keys of its own block as they were computed and those before it quantised, in whatever steps they
    // came. Rows of one item may have different blocks of their own, hence two passes.
    void attend_before_own_blocks() {
        int32_t end_key = begin_key_;
        for (int32_t row = 0; row < num_rows_; ++row) {
            last_keys_[row] = pages_.block_begin(query(row).last_key) - 1;
            end_key = std::max(end_key, last_keys_[row] + 1);
        }
        end_key = std::min(end_key, end_key_);
        const bool direct = pages_.direct() && num_groups_ <= 2;
        for (int32_t begin = tile_begin(begin_key_); begin < end_key; begin += kTileKeys) {
            const int32_t end = std::min(begin + kTileKeys, end_key);
            if (direct && end < end_key) {
                attend_tile(pages_.view(begin, end, tables_, pages_, end, end_key), begin, end);
            } else if (direct) {
                const int32_t next = tile_begin(next_item_.begin_key);
                attend_tile(pages_.view(begin, end, tables_, next_pages_, next, next_item_.end_key), begin, end);
            } else {
                attend_tile(pages_.copy(begin, end, keys_, values_, padded_dim_, tables_, end_key), begin, end);
            }
        }
    }

    void attend_own_blocks() {
        int32_t begin_key = end_key_;
        for (int32_t row = 0; row < num_rows_; ++row) {
            first_keys_[row] = std::max(first_keys_[row], last_keys_[row] + 1);
            last_keys_[row] = query(row).last_key;
            begin_key = std::min(begin_key, first_keys_[row]);
        }
        for (int32_t begin = tile_begin(begin_key); begin < end_key_; begin += kTileKeys) {
            const int32_t end = std::min(begin + kTileKeys, end_key_);
            attend_tile(pages_.copy_open(begin, end, keys_, values_, padded_dim_, tables_, begin_key), begin, end);
        }
    }

    void take_arrays(Arena &arena) {
        queries_ = arena.take<float>(num_rows_ * call_.head_dim());
        first_keys_ = arena.take<int32_t>(num_rows_);
        last_keys_ = arena.take<int32_t>(num_rows_);
        hidden_ = arena.take<Hidden>(num_rows_);
        weights_ = arena.take<float>(kRows * kTileKeys);
        best_ = arena.take<float>(num_rows_);
        totals_ = arena.take<float>(num_rows_ * Vec::kLanes);
        sums_ = arena.take<float>(num_rows_ * padded_dim_);
        keys_ = arena.take<float>(call_.head_dim() * kTileKeys);
        values_ = arena.take<float>(kTileKeys * padded_dim_);
        tables_ = arena.take<float>(Pages::table_size(call_.head_dim()));
        if (!has_runs()) return;
        whole_ = arena.take<Seen>(num_rows_);
        whole_sums_ = arena.take<float>(num_rows_ * padded_dim_);
    }

    int32_t group_begin(int32_t group) const { return num_rows_ * group / num_groups_; }

    const Query &query(int32_t row) const {
        return call_.plan->queries[item_.first_query + row / call_.group()];
    }

    int32_t head(int32_t row) const { return first_head_ + row % call_.group(); }

    void load_queries(int32_t group) {
        const int32_t begin = group_begin(group), count = group_begin(group + 1) - begin, head_dim = call_.head_dim();
        for (int32_t row = begin; row < begin + count; ++row) {
            hidden_[row] = {query(row).tree_begin, query(row).hidden};
            const float *from = call_.queries + query(row).row * call_.q_stride + head(row) * head_dim;
            float *to = queries_ + begin * head_dim + (row - begin);
            for (int32_t d = 0; d < head_dim; ++d) to[d * count] = from[d] * call_.scale;
        }
    }

    template <class AnyTile>
    void attend_tile(const AnyTile &tile, int32_t begin, int32_t end) {
        for (int32_t group = 0; group < num_groups_; ++group) {
            const int32_t row = group_begin(group);
            const Rows rows{group_begin(group + 1) - row,
                            queries_ + row * call_.head_dim(),
                            first_keys_ + row,
                            last_keys_ + row,
                            hidden_ + row,
                            weights_,
                            best_ + row,
                            totals_ + row * Vec::kLanes,
                            sums_ + row * padded_dim_};
            attend(rows, tile, begin, end, call_.head_dim(), padded_dim_, call_.softcap);
        }
    }

    void finish(int32_t row, const Seen &seen) {
        if (item_.first_partial < 0) {
            float *out = call_.out + query(row).row * call_.out_stride + head(row) * call_.head_dim();
            for (int32_t d = 0; d < call_.head_dim(); ++d) out[d] = seen.sums[d] / seen.total;
            return;
        }
        float *partial = call_.partial(item_.first_partial + row / call_.group(), head(row));
        std::copy(seen.sums, seen.sums + padded_dim_, partial);
        partial[padded_dim_] = seen.best;
        partial[padded_dim_ + 1] = seen.total;
    }

    const Call &call_;
    const AttentionItem &item_;
    const int32_t first_head_;
    const int32_t num_rows_;
    const int32_t num_groups_;
    const int32_t padded_dim_;
    const Pages pages_;
    const AttentionItem &next_item_;
    const Pages next_pages_;
    float *queries_;
    int32_t *first_keys_;
    int32_t *last_keys_;
    Hidden *hidden_;
    float *weights_;
    float *best_;
    float *totals_;
    float *sums_;
    float *keys_;
    float *values_;
    float *tables_;
    int32_t begin_key_;  // of the run at work
    int32_t end_key_;
    Seen *whole_;  // of the runs before it, where the item has several
    float *whole_sums_;
};

// One row of the output out of its parts. The first one's memory takes the sum.
void merge(const Call &call, const Merge &merge, int32_t head) {
    const int32_t padded_dim = call.padded_dim();
    const int32_t *parts = call.plan->parts.data() + merge.first_part;
    const auto part = [&](int32_t i) {
        float *partial = call.partial(parts[i], head);
        return Seen{partial, partial[padded_dim], partial[padded_dim + 1]};
    };
    Seen whole = part(0);
    for (int32_t i = 1; i < merge.num_parts; ++i) whole = plus(whole, part(i), padded_dim);
    float *out = call.out + merge.row * call.out_stride + head * call.head_dim();
    for (int32_t d = 0; d < call.head_dim(); ++d) out[d] = whole.sums[d] / whole.total;
}

template <class Pages>
void attend_all(Call call) {
    const wr_attention_plan &plan = *call.plan;
    call.partials = static_cast<float *>(scratch(
        Scratch::kAttention, sizeof(float) * plan.num_partials * plan.num_heads * call.partial_size()));
    const bool serial = plan.work * call.head_dim() < kSerialWork;
    const int64_t count = static_cast<int64_t>(plan.items.size()) * plan.num_kv_heads;
    // The heads of one item follow each other: their pages are neighbours.
    parallel_for(count, serial ? count : grain_for(count, 1, 32), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t next = std::min(i + 1, end - 1);
            Worker<Pages>(call, plan.items[i / plan.num_kv_heads], static_cast<int32_t>(i % plan.num_kv_heads),
                           plan.items[next / plan.num_kv_heads], static_cast<int32_t>(next % plan.num_kv_heads))
                .run();
        }
    });
    const int64_t rows = static_cast<int64_t>(plan.merges.size()) * plan.num_heads;
    const bool few = static_cast<int64_t>(plan.num_partials) * plan.num_heads * call.head_dim() < kSerialWork;
    parallel_for(rows, few ? rows : grain_for(rows, 1), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            merge(call, plan.merges[i / plan.num_heads], static_cast<int32_t>(i % plan.num_heads));
        }
    });
}

}  // namespace
}  // namespace wr

extern "C" void wr_paged_attention(const wr_attention_plan *plan, const float *queries, int64_t q_stride,
                                   const wr_kv_cache *cache, float scale, float softcap, float *out,
                                   int64_t out_stride) {
    const wr::Call call{plan, queries, q_stride, cache, scale, softcap, out, out_stride, nullptr};
    switch (cache->format) {
        case WR_KV_INT8:
            return wr::attend_all<wr::QuantisedPages<8, 8>>(call);
        case WR_KV_INT4:
            return wr::attend_all<wr::QuantisedPages<4, 4>>(call);
        case WR_KV_K8V4:
            return wr::attend_all<wr::QuantisedPages<8, 4>>(call);
        case WR_F32:
            return wr::attend_all<wr::Pages<wr::Float32>>(call);
        case WR_F16:
            return wr::attend_all<wr::Pages<wr::Float16>>(call);
        case WR_BF16:
            return wr::attend_all<wr::Pages<wr::BFloat16>>(call);
    }
}
