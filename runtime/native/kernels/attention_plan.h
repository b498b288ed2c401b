// How a step's attention is shared out to threads. The same plan serves all layers of one AttentionSpec.
//
// A step runs as: store over ranges of tokens | barrier | items, which threads take from a counter, in order |
// barrier if there are merges | merges. Where `stores_inside`, the first part and its barrier fall away: before item
// i, whoever takes it calls attention_store_head for the item's sequence and head if `stores(i)`. The plan decides
// who computes what when; results do not depend on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention.h"

namespace optimc {

// Items [first, first + count) hold the splits of the same queries.
struct AttentionMerge {
    std::size_t first;
    std::size_t count;
};

class AttentionPlan {
  public:
    // Takes all the memory it will need for steps of up to `max_tokens` tokens and `max_sequences` sequences.
    AttentionPlan(const AttentionSpec& spec, int threads, std::int64_t max_tokens, std::int64_t max_sequences);

    void fill(const StepLayout& step);

    // Expensive ones first; items to be merged follow each other.
    const std::vector<AttentionItem>& items() const { return items_; }
    const std::vector<AttentionMerge>& merges() const { return merges_; }
    bool stores_inside() const { return stores_inside_; }
    bool stores(std::size_t item) const { return stores_inside_ && last_splits_[item] != 0; }
    // Floats that the partial results of any step take.
    std::int64_t partial_floats() const;

  private:
    // Queries of one sequence with one key/value head, over all splits they see.
    struct Piece {
        AttentionItem item;
        double cost;  // of the whole
        int parts;    // that its splits are dealt out to
        double part_cost() const { return cost / parts; }
    };

    void add_pieces(const StepLayout& step, std::int32_t sequence);
    bool is_balanced(double total_cost);
    void cut(double total_cost);
    void emit(const StepLayout& step);

    AttentionSpec spec_;
    std::int64_t group_;
    std::size_t threads_;
    std::int32_t block_queries_ = 1;
    bool stores_inside_ = false;
    std::vector<Piece> pieces_;
    std::vector<double> loads_;  // [threads]
    std::vector<AttentionItem> items_;
    std::vector<std::uint8_t> last_splits_;  // [items]
    std::vector<AttentionMerge> merges_;
};

}  // namespace optimc
