#include "attention_plan.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

namespace wr {
namespace {

class Planner {
  public:
    Planner(wr_attention_plan &plan, const wr_sequences &sequences, int32_t block_size, int32_t window)
        : plan_(plan), sequences_(sequences), block_size_(block_size), window_(window) {
        item_queries_ = std::max(1, kItemRows / (plan.num_heads / plan.num_kv_heads));
    }

    void run() {
        std::vector<int32_t> decodes;
        for (int32_t index = 0; index < sequences_.num_seqs; ++index) {
            const int32_t count = num_queries(index);
            if (count == 1) decodes.push_back(index);
            if (count > 1 && count <= item_queries_) plan_runs(index);
            if (count > item_queries_) plan_tiles(index);
        }
        plan_decodes(decodes);
        collect_parts();
        order_items();
    }

  private:
    // A part of a query's result, while the items are made.
    struct Part {
        int32_t query;
        int32_t begin_key;
        int32_t partial;
    };

    int32_t num_queries(int32_t sequence) const {
        return sequences_.cu_seqlens_q[sequence + 1] - sequences_.cu_seqlens_q[sequence];
    }

    const int32_t *blocks(int32_t sequence) const {
        return sequences_.block_table + sequence * sequences_.table_stride;
    }

    void add_queries(int32_t sequence) {
        const int32_t count = num_queries(sequence), start = sequences_.seqused_k[sequence] - count;
        for (int32_t i = 0; i < count; ++i) {
            const int32_t row = sequences_.cu_seqlens_q[sequence] + i;
            if (sequences_.tree_mask != nullptr && sequences_.tree_mask[row] != 0) {
                plan_.queries.push_back(node(row, start, static_cast<uint64_t>(sequences_.tree_mask[row])));
                continue;
            }
            const int32_t position = start + i;
            const int32_t first = window_ > 0 ? std::max(0, position - window_ + 1) : 0;
            plan_.queries.push_back({row, first, position, start, 0});
        }
    }

    // A query of a tree whose first key is `begin`, and which sees those in `mask`: itself is the last of them, and they
    // stand side by side in its sequence.
    Query node(int32_t row, int32_t begin, uint64_t mask) const {
        const int32_t position = begin + std::popcount(mask) - 1;
        int32_t first = window_ > 0 ? std::max(0, position - window_ + 1) : 0;
        while (first > begin && std::popcount(mask) > window_) mask &= mask - 1;
        if (first > begin) first = begin + std::countr_zero(mask);
        const int32_t last = std::bit_width(mask) - 1;
        return {row, first, begin + last, begin, ~mask & (~uint64_t{0} >> (63 - last))};
    }

    // The keys that any of some queries sees, [first, second).
    std::pair<int32_t, int32_t> seen(int32_t first, int32_t count) const {
        std::pair<int32_t, int32_t> keys{plan_.queries[first].first_key, plan_.queries[first].last_key + 1};
        for (int32_t i = first + 1; i < first + count; ++i) {
            keys.first = std::min(keys.first, plan_.queries[i].first_key);
            keys.second = std::max(keys.second, plan_.queries[i].last_key + 1);
        }
        return keys;
    }

    // Many queries: tiles of them, each over all the keys that one of its queries sees.
    void plan_tiles(int32_t sequence) {
        const int32_t begin = static_cast<int32_t>(plan_.queries.size());
        add_queries(sequence);
        const int32_t end = static_cast<int32_t>(plan_.queries.size());
        for (int32_t first = begin; first < end; first += item_queries_) {
            const int32_t count = std::min(item_queries_, end - first);
            const auto [begin_key, end_key] = seen(first, count);
            add_item(first, count, sequence, begin_key, end_key, false);
        }
    }

    // Few queries of one sequence: all of them together, over one run of keys after the other.
    void plan_runs(int32_t sequence) {
        const int32_t first = static_cast<int32_t>(plan_.queries.size()), count = num_queries(sequence);
        add_queries(sequence);
        const auto [begin_key, end_key] = seen(first, count);
        const bool split = begin_key / kRunKeys != (end_key - 1) / kRunKeys;
        for (int32_t key = begin_key; key < end_key; key = next_run(key)) {
            add_item(first, count, sequence, key, std::min(next_run(key), end_key), split);
        }
    }

    // Single queries. Sequences in the order of their tables: those with a common prefix are neighbours, and each run
    // of it is read once for all of them.
    void plan_decodes(std::vector<int32_t> &decodes) {
        std::vector<int32_t> shared(decodes.size(), 0);  // leading keys in common with the one before
        if (window_ == 0) {
            std::sort(decodes.begin(), decodes.end(), [this](int32_t a, int32_t b) { return table_less(a, b); });
            for (size_t i = 1; i < decodes.size(); ++i) shared[i] = common_keys(decodes[i - 1], decodes[i]);
        }
        const int32_t first_query = static_cast<int32_t>(plan_.queries.size());
        for (int32_t sequence : decodes) add_queries(sequence);
        std::vector<int32_t> next(decodes.size());  // first key that no item covers yet
        for (size_t i = 0; i < decodes.size(); ++i) next[i] = plan_.queries[first_query + i].first_key;
        for (size_t i = 0; i < decodes.size(); ++i) {
            const Query query = plan_.queries[first_query + i];
            const bool split = query.first_key / kRunKeys != query.last_key / kRunKeys;
            while (next[i] <= query.last_key) {
                const int32_t key = next[i], end_key = std::min(next_run(key), query.last_key + 1);
                size_t last = i;  // the run's followers: a run that all of them see whole
                while (last + 1 < decodes.size() && shared[last + 1] >= next_run(key)) ++last;
                for (size_t j = i; j <= last; ++j) next[j] = end_key;
                for (size_t j = i; j <= last; j += item_queries_) {
                    const int32_t count = static_cast<int32_t>(std::min<size_t>(item_queries_, last + 1 - j));
                    add_item(static_cast<int32_t>(first_query + j), count, decodes[i], key, end_key, split);
                }
            }
        }
    }

    // Blocks that lie wholly in runs which the sequence's last query sees whole, before its own key's run.
    int32_t shareable_blocks(int32_t sequence) const {
        return (sequences_.seqused_k[sequence] - 1) / kRunKeys * kRunKeys / block_size_;
    }

    bool table_less(int32_t a, int32_t b) const {
        return std::lexicographical_compare(blocks(a), blocks(a) + shareable_blocks(a), blocks(b),
                                            blocks(b) + shareable_blocks(b));
    }

    int32_t common_keys(int32_t a, int32_t b) const {
        const int32_t limit = std::min(shareable_blocks(a), shareable_blocks(b));
        const int32_t *end = std::mismatch(blocks(a), blocks(a) + limit, blocks(b)).first;
        return static_cast<int32_t>(end - blocks(a)) * block_size_;
    }

    void add_item(int32_t first, int32_t count, int32_t sequence, int32_t begin_key, int32_t end_key, bool split) {
        plan_.items.push_back({first, count, sequence, begin_key, end_key, split ? plan_.num_partials : -1});
        plan_.work += static_cast<int64_t>(count) * (end_key - begin_key) * plan_.num_heads;
        if (!split) return;
        for (int32_t query = first; query < first + count; ++query) {
            parts_.push_back({query, begin_key, plan_.num_partials++});
        }
    }

    void collect_parts() {
        std::sort(parts_.begin(), parts_.end(), [](const Part &a, const Part &b) {
            return a.query != b.query ? a.query < b.query : a.begin_key < b.begin_key;
        });
        for (size_t i = 0; i < parts_.size(); ++i) {
            if (i == 0 || parts_[i].query != parts_[i - 1].query) {
                plan_.merges.push_back({plan_.queries[parts_[i].query].row, static_cast<int32_t>(i), 0});
            }
            ++plan_.merges.back().num_parts;
            plan_.parts.push_back(parts_[i].partial);
        }
    }

    // Long items first, so that no thread begins one when the others are done.
    void order_items() {
        const auto cost = [](const AttentionItem &item) {
            return static_cast<int64_t>(item.num_queries) * (item.end_key - item.begin_key);
        };
        std::stable_sort(plan_.items.begin(), plan_.items.end(),
                         [&](const AttentionItem &a, const AttentionItem &b) { return cost(a) > cost(b); });
    }

    wr_attention_plan &plan_;
    const wr_sequences &sequences_;
    const int32_t block_size_;
    const int32_t window_;
    int32_t item_queries_;
    std::vector<Part> parts_;
};

}  // namespace
}  // namespace wr

extern "C" wr_attention_plan *wr_plan_attention(const wr_sequences *sequences, int32_t num_heads, int32_t num_kv_heads,
                                                int32_t head_dim, int32_t block_size, int32_t window) {
    auto *plan = new wr_attention_plan{
        num_heads, num_kv_heads, head_dim, sequences->block_table, sequences->table_stride, {}, {}, {}, {}, 0, 0};
    wr::Planner(*plan, *sequences, block_size, window).run();
    return plan;
}

extern "C" void wr_free_attention_plan(wr_attention_plan *plan) { delete plan; }
