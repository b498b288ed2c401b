#include "kernels/attention_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "kernels/attention_units.h"
#include "tests/check.h"

using namespace optimc;

namespace {

// Sequences that decode, prefill or verify: (context, queries) each.
struct PlannedStep {
    std::vector<std::int64_t> positions;
    std::vector<std::int32_t> query_start{0}, context_len;
    std::vector<std::uint8_t> mask{1};
    StepLayout layout{};

    explicit PlannedStep(const std::vector<std::pair<int, int>>& sequences, bool tree = false) {
        for (const auto& [context, queries] : sequences) {
            for (int i = 0; i < queries; ++i) positions.push_back(context + i);
            query_start.push_back(query_start.back() + queries);
            context_len.push_back(context);
        }
        layout.num_tokens = query_start.back();
        layout.num_sequences = static_cast<std::int64_t>(sequences.size());
        layout.positions = positions.data();
        layout.query_start = query_start.data();
        layout.context_len = context_len.data();
        layout.tree_mask = tree ? mask.data() : nullptr;
    }
};

AttentionSpec spec_of(int heads, int kv_heads, std::int64_t window = 0) {
    return {heads, kv_heads, 64, 0.125f, 0, window, 64, false};
}

AttentionPlan planned(const AttentionSpec& spec, int threads, const PlannedStep& step) {
    AttentionPlan plan(spec, threads, 1024, 64);
    plan.fill(step.layout);
    return plan;
}

// Keys times rows that each thread gets when all take items in order, over the even share.
double imbalance(const AttentionPlan& plan, int threads) {
    std::vector<double> loads(static_cast<std::size_t>(threads));
    for (const AttentionItem& item : plan.items()) {
        *std::min_element(loads.begin(), loads.end()) +=
            (item.split_end - item.split_begin) * (item.query_end - item.query_begin);
    }
    return *std::max_element(loads.begin(), loads.end()) * threads / std::accumulate(loads.begin(), loads.end(), 0.0);
}

}  // namespace

TEST("a plan covers every query, head and split once; parts to merge follow each other") {
    const std::vector<std::vector<std::pair<int, int>>> steps = {
        {{2000, 1}}, {{0, 512}}, {{0, 1}}, {{5000, 1}, {3, 1}, {700, 1}}, {{100, 300}, {4000, 1}, {0, 17}, {256, 1}}};
    for (const auto& sequences : steps) {
        for (const auto& [heads, kv_heads] : {std::pair{9, 3}, {32, 8}, {71, 1}, {200, 1}}) {
            for (int threads : {1, 2, 7, 64}) {
                for (std::int64_t window : {0, 300}) {
                    const PlannedStep step(sequences, threads == 7);
                    const AttentionSpec spec = spec_of(heads, kv_heads, window);
                    const AttentionPlan plan = planned(spec, threads, step);
                    // Per (sequence, head, query): the next split that must come.
                    std::map<std::tuple<int, int, int>, int> next;
                    std::vector<bool> merged(plan.items().size());
                    for (const AttentionMerge& merge : plan.merges()) {
                        CHECK(merge.count > 1);
                        for (std::size_t i = 0; i < merge.count; ++i) merged[merge.first + i] = true;
                    }
                    std::int64_t partials = 0;
                    for (std::size_t i = 0; i < plan.items().size(); ++i) {
                        const AttentionItem& item = plan.items()[i];
                        CHECK(item.split_begin < item.split_end && item.query_begin < item.query_end);
                        CHECK((item.partial >= 0) == merged[i]);
                        if (merged[i]) {
                            CHECK(item.partial == partials);
                            partials += (item.query_end - item.query_begin) * (heads / kv_heads) *
                                        (item.split_end - item.split_begin);
                        }
                        for (int q = item.query_begin; q < item.query_end; ++q) {
                            const std::tuple key{item.sequence, item.kv_head, q};
                            const auto [at, fresh] = next.try_emplace(key, item.split_begin);
                            CHECK(at->second == item.split_begin);
                            CHECK(fresh || merged[i]);
                            at->second = item.split_end;
                            const int context = sequences[item.sequence].first;
                            if (fresh && window == 0) CHECK(item.split_begin == 0);
                            if (fresh && window > 0) {
                                CHECK(item.split_begin * kSplitKeys <= std::max<int>(0, context + q + 1 - window));
                            }
                        }
                    }
                    CHECK(partials * attention_partial_floats(spec.head_dim) <= plan.partial_floats());
                    std::size_t covered = 0;
                    for (const auto& [key, split] : next) {
                        const auto [sequence, head, q] = key;
                        CHECK(split * kSplitKeys >= sequences[sequence].first + q + 1);
                        covered += head < kv_heads;
                    }
                    CHECK(covered == static_cast<std::size_t>(step.layout.num_tokens * kv_heads));
                }
            }
        }
    }
}

TEST("contexts are cut only where the batch alone does not keep threads busy") {
    const PlannedStep decode({{2000, 1}});
    CHECK(planned(spec_of(9, 3), 1, decode).merges().empty());
    CHECK(planned(spec_of(9, 3), 2, decode).merges().size() == 3);
    CHECK(imbalance(planned(spec_of(9, 3), 2, decode), 2) < 1.1);
    CHECK(planned(spec_of(32, 8), 2, decode).merges().empty());
    CHECK(imbalance(planned(spec_of(32, 8), 16, decode), 16) < 1.3);
    const std::vector<std::pair<int, int>> batch(16, {700, 1});
    CHECK(planned(spec_of(9, 3), 2, PlannedStep(batch)).merges().empty());
    CHECK(planned(spec_of(9, 3), 2, PlannedStep({{0, 512}})).merges().empty());
    // One long sequence among short ones.
    std::vector<std::pair<int, int>> uneven(7, {60, 1});
    uneven.push_back({8000, 1});
    CHECK(imbalance(planned(spec_of(9, 3), 4, PlannedStep(uneven)), 4) < 1.2);
}

TEST("a prompt's items are many enough for all threads, expensive ones first") {
    const AttentionPlan plan = planned(spec_of(9, 3), 2, PlannedStep({{0, 512}}));
    CHECK(plan.items().size() >= 8);
    CHECK(plan.items().front().query_end == 512);
    CHECK(plan.items().back().query_begin == 0);
}

TEST("threads store what only they read, where each head's queries are one item's") {
    const PlannedStep decode({{2000, 1}, {7, 1}});
    const AttentionPlan plan = planned(spec_of(9, 3), 2, decode);
    CHECK(plan.stores_inside());
    std::map<std::pair<int, int>, int> stores;
    for (std::size_t i = 0; i < plan.items().size(); ++i) {
        const AttentionItem& item = plan.items()[i];
        if (!plan.stores(i)) continue;
        ++stores[{item.sequence, item.kv_head}];
        CHECK(item.split_end == decode.context_len[item.sequence] / kSplitKeys + 1);
    }
    CHECK(stores.size() == 6);
    for (const auto& [head, count] : stores) CHECK(count == 1);
    CHECK(!planned(spec_of(9, 3), 2, PlannedStep({{0, 512}})).stores_inside());
    // The new tokens lie in two splits, which two items may hold.
    const AttentionPlan across = planned(spec_of(9, 3), 2, PlannedStep({{2040, 20}}));
    CHECK(!across.stores_inside() || across.merges().empty());
}

TEST("filling a plan takes no memory") {
    AttentionPlan plan(spec_of(9, 3), 4, 600, 8);
    const AttentionItem* items = plan.items().data();
    const AttentionMerge* merges = plan.merges().data();
    for (const auto& sequences : std::vector<std::vector<std::pair<int, int>>>{
             {{0, 600}}, {{9000, 1}}, {{9000, 75}, {800, 75}, {0, 75}, {10, 75}, {1, 75}, {0, 75}, {3, 75}, {4, 75}}}) {
        plan.fill(PlannedStep(sequences).layout);
        CHECK(!plan.items().empty());
        CHECK(plan.items().data() == items && plan.merges().data() == merges);
    }
}
