// First vectorised passes narrow the row to the few tokens among which the cutoff lies; then weighted radix selection
// among those: linear whatever the distribution, no sort. Distances are >= 0, so their bit patterns order as they do;
// three histograms over 12, 12 and 7 bits of the pattern find the cutoff exactly.
#include "sampling/cutoff.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <numeric>
#include <vector>

#include "sampling/instruction_sets.h"

namespace optimc {

namespace {

constexpr int kLanes = 16;
constexpr std::int32_t kSumBlock = 1024;  // float partial sums stay short; blocks are joined in double
constexpr std::int32_t kFewTokens = 4096;
constexpr int kMostHalvings = 8;

// Of values >= 0 only, where the order of the patterns is that of the values.
std::int32_t bits_of(float value) { return std::bit_cast<std::int32_t>(value); }

// Pattern of the least distance in each block.
OPTIMC_EACH_INSTRUCTION_SET
void find_nearest(const float* logits, std::int32_t vocab, float max, std::int32_t* nearest) {
    for (std::int32_t block = 0; block < cutoff_blocks(vocab); ++block) {
        const std::int32_t end = std::min(vocab, (block + 1) * kCutoffBlock);
        std::int32_t least = std::numeric_limits<std::int32_t>::max();
        for (std::int32_t i = block * kCutoffBlock; i < end; ++i) least = std::min(least, bits_of(max - logits[i]));
        nearest[block] = least;
    }
}

struct Within {
    double mass;
    std::int32_t count;
};

// The weight if the distance is no farther than `distance`, else 0, without a branch or a conditional load.
float weight_within(float weight, float token_distance, float distance) {
    const std::int32_t mask = -static_cast<std::int32_t>(token_distance <= distance);
    return std::bit_cast<float>(std::bit_cast<std::int32_t>(weight) & mask);
}

// Sum of the weights of tokens no farther than `distance`, and how many they are.
OPTIMC_EACH_INSTRUCTION_SET
Within measure_within(const float* logits, const float* weights, std::int32_t vocab, float max, float distance) {
    Within within{0, 0};
    for (std::int32_t start = 0; start < vocab; start += kSumBlock) {
        const std::int32_t end = std::min(vocab, start + kSumBlock);
        float lanes[kLanes] = {};
        std::int32_t i = start;
        for (; i + kLanes <= end; i += kLanes) {
            for (int j = 0; j < kLanes; ++j) {
                lanes[j] += weight_within(weights[i + j], max - logits[i + j], distance);
            }
        }
        for (; i < end; ++i) lanes[0] += weight_within(weights[i], max - logits[i], distance);
        for (float lane : lanes) within.mass += lane;
        for (i = start; i < end; ++i) within.count += max - logits[i] <= distance;
    }
    return within;
}

struct Crossing {
    std::int32_t bin;
    double before;  // sum of all bins in front of it
};

// The first bin with which the running sum reaches `target`; the last non-empty one if rounding lets none reach it.
Crossing find_crossing(const double* bins, std::int32_t size, double sum, double target) {
    Crossing last{0, sum};
    for (std::int32_t bin = 0; bin < size; ++bin) {
        if (bins[bin] == 0) continue;
        last = {bin, sum};
        sum += bins[bin];
        if (sum >= target) break;
    }
    return last;
}

// Lists in `tokens` the ids for which `is_candidate`, looking only into blocks that may hold one; returns how many.
template <typename BlockTest, typename TokenTest>
std::int32_t gather(std::int32_t vocab, std::int32_t* tokens, BlockTest may_hold, TokenTest is_candidate) {
    std::int32_t count = 0;
    for (std::int32_t block = 0; block < cutoff_blocks(vocab); ++block) {
        if (!may_hold(block)) continue;
        const std::int32_t end = std::min(vocab, (block + 1) * kCutoffBlock);
        for (std::int32_t i = block * kCutoffBlock; i < end; ++i) {
            tokens[count] = i;  // stays only if count moves on
            count += is_candidate(i);
        }
    }
    return count;
}

// The first of `tokens` (ids ascending), in order of distance, with which the sum of weights, begun at `before`, reaches
// `target`.
template <typename Weight>
Cutoff select(const float* logits, float max, std::int32_t* tokens, std::int32_t count, double* bins, Weight weight,
              double before, double target) {
    assert(count > 0);
    std::int32_t prefix = 0;
    for (const auto& [shift, width] : {std::pair{19, 12}, std::pair{7, 12}, std::pair{0, 7}}) {
        const std::int32_t size = 1 << width;
        std::fill_n(bins, size, 0.0);
        for (std::int32_t n = 0; n < count; ++n) {
            bins[(bits_of(max - logits[tokens[n]]) >> shift) & (size - 1)] += weight(tokens[n]);
        }
        const Crossing crossing = find_crossing(bins, size, before, target);
        before = crossing.before;
        prefix = (prefix << width) | crossing.bin;
        std::int32_t kept = 0;
        for (std::int32_t n = 0; n < count; ++n) {
            const std::int32_t token = tokens[n];
            tokens[kept] = token;
            kept += (bits_of(max - logits[token]) >> shift) == prefix;
        }
        count = kept;
    }
    // All that remain are equally far and stand in id order.
    double sum = before;
    std::int32_t n = 0;
    while (n + 1 < count && (sum += weight(tokens[n])) < target) ++n;
    return {std::bit_cast<float>(prefix), tokens[n]};
}

std::vector<std::int32_t> tokens_in_order(const float* logits, std::int32_t vocab, float max) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(vocab));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t a, std::int32_t b) { return max - logits[a] < max - logits[b]; });
    return order;
}

}  // namespace

Cutoff cutoff_by_count(const float* logits, std::int32_t vocab, float max, std::int32_t count,
                       CutoffScratch scratch) {
    assert(1 <= count && count <= vocab);
    max += 0.0f;  // not -0, from which +0 is at distance -0
    const std::int32_t blocks = cutoff_blocks(vocab);
    std::int32_t* nearest = scratch.blocks;
    find_nearest(logits, vocab, max, nearest);
    // At least `count` tokens are as near as the count-th nearest block's best.
    std::int32_t bound = std::numeric_limits<std::int32_t>::max();
    if (count <= blocks) {
        std::int32_t* sorted = nearest + blocks;
        std::copy_n(nearest, blocks, sorted);
        std::nth_element(sorted, sorted + count - 1, sorted + blocks);
        bound = sorted[count - 1];
    }
    const std::int32_t candidates = gather(
        vocab, scratch.tokens, [=](std::int32_t block) { return nearest[block] <= bound; },
        [=](std::int32_t i) { return bits_of(max - logits[i]) <= bound; });
    return select(logits, max, scratch.tokens, candidates, scratch.bins, [](std::int32_t) { return 1.0; }, 0, count);
}

Cutoff cutoff_by_mass(const float* logits, const float* weights, std::int32_t vocab, float max, float temperature,
                      float share, CutoffScratch scratch) {
    assert(0 < share && share < 1);
    max += 0.0f;  // not -0, from which +0 is at distance -0
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const auto within = [=](float distance) { return measure_within(logits, weights, vocab, max, distance); };
    const double total = within(infinity).mass;
    const double target = share * total;

    // The cutoff is farther than `near` and no farther than `far`. To begin with: tokens lighter than
    // (1 - share) * total / vocab together weigh less than what is left out.
    float near = -1;
    float far = static_cast<float>(-temperature * std::log((1.0 - share) * total / vocab));
    Within in_near{0, 0};
    Within in_far = within(far);
    if (in_far.mass < target) {  // by rounding, as share approaches 1
        far = infinity;
        in_far = {total, vocab};
    }
    for (int halving = 0; halving < kMostHalvings && in_far.count - in_near.count > kFewTokens; ++halving) {
        const float middle = (std::max(near, 0.0f) + far) / 2;
        const Within in_middle = within(middle);
        if (in_middle.mass < target) {
            near = middle;
            in_near = in_middle;
        } else {
            far = middle;
            in_far = in_middle;
        }
    }

    std::int32_t* nearest = scratch.blocks;
    find_nearest(logits, vocab, max, nearest);
    const std::int32_t far_bits = bits_of(far);
    const std::int32_t candidates = gather(
        vocab, scratch.tokens, [=](std::int32_t block) { return nearest[block] <= far_bits; },
        [=](std::int32_t i) { return (max - logits[i] > near) & (max - logits[i] <= far); });
    const auto weight = [=](std::int32_t i) { return static_cast<double>(weights[i]); };
    return select(logits, max, scratch.tokens, candidates, scratch.bins, weight, in_near.mass, target);
}

OPTIMC_EACH_INSTRUCTION_SET
void drop_beyond(const float* __restrict logits, std::int32_t vocab, float max, Cutoff cutoff,
                 float* __restrict weights) {
    for (std::int32_t i = 0; i < vocab; ++i) {
        const float distance = max - logits[i];
        const bool kept = (distance < cutoff.distance) | ((distance == cutoff.distance) & (i <= cutoff.token));
        weights[i] = kept ? weights[i] : 0.0f;
    }
}

Cutoff cutoff_by_count_reference(const float* logits, std::int32_t vocab, float max, std::int32_t count) {
    const std::int32_t token = tokens_in_order(logits, vocab, max)[static_cast<std::size_t>(count - 1)];
    return {max - logits[token], token};
}

Cutoff cutoff_by_mass_reference(const float* logits, const float* weights, std::int32_t vocab, float max,
                                float share) {
    const double total = std::accumulate(weights, weights + vocab, 0.0);
    double sum = 0;
    std::int32_t last = 0;
    for (std::int32_t token : tokens_in_order(logits, vocab, max)) {
        last = token;
        sum += weights[token];
        if (sum >= share * total) break;
    }
    return {max - logits[last], last};
}

}  // namespace optimc
