#include "kernels/attention_plan.h"

#include <algorithm>
#include <numeric>

#include "kernels/attention_units.h"

namespace optimc {

namespace {

// Fewer rows would read and widen every key too often.
constexpr std::int64_t kLeastRows = 12;
// Items per thread, so that a thread that is held up does not hold up the others.
constexpr std::size_t kItemsPerThread = 4;
// Reading a key costs about as much as multiplying it with so many rows.
constexpr double kReadCost = 2.0;
// Threads may wait this share of their time for the slowest before contexts are cut: a cut costs a barrier and merges.
constexpr double kBalanced = 1.15;
// Rows times splits that may wait to be merged: a few megabytes. What does not fit is not cut.
constexpr std::int64_t kMaxPartials = 8192;

}  // namespace

AttentionPlan::AttentionPlan(const AttentionSpec& spec, int threads, std::int64_t max_tokens,
                             std::int64_t max_sequences)
    : spec_(spec),
      group_(spec.num_heads / spec.num_kv_heads),
      threads_(static_cast<std::size_t>(threads)),
      loads_(static_cast<std::size_t>(threads)) {
    const std::int64_t blocks = max_tokens / std::max<std::int64_t>(1, kLeastRows / group_) + max_sequences;
    const std::size_t pieces = static_cast<std::size_t>(blocks * spec.num_kv_heads);
    pieces_.reserve(pieces);
    merges_.reserve(pieces);
    // `cut` makes at most one item more for every piece and every share of the total.
    items_.reserve(2 * pieces + kItemsPerThread * threads_);
    last_splits_.reserve(2 * pieces + kItemsPerThread * threads_);
}

std::int64_t AttentionPlan::partial_floats() const { return kMaxPartials * attention_partial_floats(spec_.head_dim); }

void AttentionPlan::add_pieces(const StepLayout& step, std::int32_t sequence) {
    const std::int64_t first_token = step.query_start[sequence];
    const std::int32_t queries = step.query_start[sequence + 1] - step.query_start[sequence];
    const std::int64_t context = step.context_len[sequence];
    for (std::int32_t begin = 0; begin < queries; begin += block_queries_) {
        const std::int32_t end = std::min(queries, begin + block_queries_);
        // Tree nodes may see fewer keys than this: splits without any are empty.
        const std::int64_t last_key = context + (step.tree_mask == nullptr ? end : queries);
        std::int64_t first_key = 0;
        double seen = static_cast<double>(last_key) - 0.5 * (end - begin);
        if (spec_.window > 0) {
            const std::int64_t* positions = step.positions + first_token;
            const std::int64_t oldest = *std::min_element(positions + begin, positions + end) - spec_.window + 1;
            first_key = std::clamp<std::int64_t>(oldest, 0, step.tree_mask == nullptr ? last_key - 1 : context);
            seen = std::min(seen, static_cast<double>(spec_.window));
        }
        const double rows = static_cast<double>(group_ * (end - begin));
        const double cost = kReadCost * static_cast<double>(last_key - first_key) + rows * seen;
        for (std::int32_t head = 0; head < spec_.num_kv_heads; ++head) {
            const AttentionItem item{sequence,
                                     head,
                                     begin,
                                     end,
                                     static_cast<std::int32_t>(first_key / kSplitKeys),
                                     static_cast<std::int32_t>((last_key + kSplitKeys - 1) / kSplitKeys),
                                     -1};
            pieces_.push_back({item, cost, 1});
        }
    }
}

// Whether threads that take pieces in order, expensive ones first, finish at about the same time.
bool AttentionPlan::is_balanced(double total_cost) {
    if (threads_ == 1) return true;
    std::fill(loads_.begin(), loads_.end(), 0.0);
    for (const Piece& piece : pieces_) *std::min_element(loads_.begin(), loads_.end()) += piece.cost;
    return *std::max_element(loads_.begin(), loads_.end()) <= kBalanced * total_cost / static_cast<double>(threads_);
}

void AttentionPlan::cut(double total_cost) {
    const double share = total_cost / static_cast<double>(kItemsPerThread * threads_);
    std::int64_t partials = 0;
    for (Piece& piece : pieces_) {
        const std::int64_t splits = piece.item.split_end - piece.item.split_begin;
        const std::int64_t rows = group_ * (piece.item.query_end - piece.item.query_begin);
        if (splits < 2 || piece.cost < 1.5 * share || partials + rows * splits > kMaxPartials) continue;
        const std::int64_t shares = static_cast<std::int64_t>(piece.cost / share) + 1;
        piece.parts = static_cast<int>(std::min(splits, shares));
        partials += rows * splits;
    }
}

void AttentionPlan::emit(const StepLayout& step) {
    std::int64_t partials = 0;
    for (const Piece& piece : pieces_) {
        if (piece.parts > 1) merges_.push_back({items_.size(), static_cast<std::size_t>(piece.parts)});
        const std::int32_t splits = piece.item.split_end - piece.item.split_begin;
        for (std::int32_t part = 0; part < piece.parts; ++part) {
            AttentionItem item = piece.item;
            item.split_begin = piece.item.split_begin + splits * part / piece.parts;
            item.split_end = piece.item.split_begin + splits * (part + 1) / piece.parts;
            if (piece.parts > 1) {
                item.partial = partials;
                partials += group_ * (item.query_end - item.query_begin) * (item.split_end - item.split_begin);
            }
            items_.push_back(item);
            last_splits_.push_back(part + 1 == piece.parts);
        }
        // Whoever stores must be the only one to read what it stores.
        const std::int32_t* start = step.query_start + piece.item.sequence;
        const bool all_queries = piece.item.query_end - piece.item.query_begin == start[1] - start[0];
        const std::int64_t context = step.context_len[piece.item.sequence];
        stores_inside_ &= all_queries && items_.back().split_begin * std::int64_t{kSplitKeys} <= context;
    }
}

void AttentionPlan::fill(const StepLayout& step) {
    items_.clear();
    last_splits_.clear();
    merges_.clear();
    stores_inside_ = true;
    block_queries_ = static_cast<std::int32_t>(std::max<std::int64_t>(1, kBlockRows / group_));
    for (;;) {
        pieces_.clear();
        for (std::int32_t b = 0; b < step.num_sequences; ++b) add_pieces(step, b);
        const bool enough = threads_ == 1 || pieces_.size() >= kItemsPerThread * threads_;
        if (enough || block_queries_ * group_ < 2 * kLeastRows || block_queries_ == 1) break;
        block_queries_ = (block_queries_ + 1) / 2;
    }
    const double total_cost = std::accumulate(pieces_.begin(), pieces_.end(), 0.0,
                                              [](double sum, const Piece& piece) { return sum + piece.cost; });
    // Ties are broken by order of creation, so that a plan is a function of its step.
    const auto before = [](const Piece& a, const Piece& b) {
        if (a.part_cost() != b.part_cost()) return a.part_cost() > b.part_cost();
        if (a.item.sequence != b.item.sequence) return a.item.sequence < b.item.sequence;
        if (a.item.query_begin != b.item.query_begin) return a.item.query_begin < b.item.query_begin;
        return a.item.kv_head < b.item.kv_head;
    };
    std::sort(pieces_.begin(), pieces_.end(), before);
    if (!is_balanced(total_cost)) {
        cut(total_cost);
        std::sort(pieces_.begin(), pieces_.end(), before);
    }
    emit(step);
}

}  // namespace optimc
