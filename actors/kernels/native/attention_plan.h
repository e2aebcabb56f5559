// What a step's attention does, item by item: made once per step, read by every layer.
#pragma once

#include <cstdint>
#include <vector>

#include "warmroot.h"

namespace wr {

// Keys of a run. A context is read in runs that begin at multiples of this and are then added up, whatever the batch, the
// number of queries and of threads: so a run can be shared, and a row's result is always the same bits.
constexpr int32_t kRunKeys = 256;

inline int32_t next_run(int32_t key) { return (key / kRunKeys + 1) * kRunKeys; }

// Rows (a query and a head are a row) that an item holds at most: their sums stay in the first caches.
constexpr int32_t kItemRows = 48;

// A query token: where it is in the packed batch and which keys it sees: [first_key, last_key], without those of other
// branches of a tree. Bit n of `hidden` is the key tree_begin + n.
struct Query {
    int32_t row;
    int32_t first_key;
    int32_t last_key;
    int32_t tree_begin;
    uint64_t hidden;
};

// Some queries, all heads of one KV group, over keys [begin_key, end_key) in the blocks of one sequence's table.
struct AttentionItem {
    int32_t first_query;
    int32_t num_queries;
    int32_t sequence;
    int32_t begin_key;
    int32_t end_key;
    int32_t first_partial;  // the first query's part of the result; -1: the item sees all keys and writes the output
};

// The parts of one query's result, in the order of their keys.
struct Merge {
    int32_t row;
    int32_t first_part;  // in wr_attention_plan::parts
    int32_t num_parts;
};

}  // namespace wr

struct wr_attention_plan {
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    const int32_t *block_table;  // the caller's: it outlives the plan
    int64_t table_stride;
    std::vector<wr::Query> queries;
    std::vector<wr::AttentionItem> items;  // the longest first
    std::vector<wr::Merge> merges;
    std::vector<int32_t> parts;
    int32_t num_partials;
    int64_t work;  // rows * keys of all heads
};
