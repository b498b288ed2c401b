#include "sampling/row_max.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <limits>

#include "sampling/instruction_sets.h"

namespace optimc {

namespace {

constexpr std::int32_t kBlock = 1024;
constexpr std::int32_t kMagnitude = 0x7FFFFFFF;
constexpr std::int32_t kInfinityBits = 0x7F800000;

// Integers that order as the floats do (-0 below +0), because maxima of integers vectorise without licence to ignore
// NaN. A NaN is a magnitude above infinity's.
std::int32_t order_of(float x) {
    const auto bits = std::bit_cast<std::int32_t>(x);
    return bits ^ ((bits >> 31) & kMagnitude);
}

float value_of(std::int32_t order) { return std::bit_cast<float>(order ^ ((order >> 31) & kMagnitude)); }

}  // namespace

OPTIMC_EACH_INSTRUCTION_SET
RowMax row_max(const float* logits, std::int32_t vocab) {
    assert(vocab > 0);
    std::int32_t best = std::numeric_limits<std::int32_t>::min();
    std::int32_t best_start = 0;
    std::int32_t magnitude = 0;
    for (std::int32_t start = 0; start < vocab; start += kBlock) {
        const std::int32_t count = std::min(kBlock, vocab - start);
        std::int32_t block_best = std::numeric_limits<std::int32_t>::min();
        for (std::int32_t i = 0; i < count; ++i) {
            block_best = std::max(block_best, order_of(logits[start + i]));
            magnitude = std::max(magnitude, std::bit_cast<std::int32_t>(logits[start + i]) & kMagnitude);
        }
        // As floats: a +0 does not displace a -0 of lower id.
        if (start == 0 || value_of(block_best) > value_of(best)) {
            best = block_best;
            best_start = start;
        }
    }
    if (magnitude > kInfinityBits) return {0, 0, true};
    const float value = value_of(best);
    std::int32_t token = best_start;
    while (logits[token] != value) ++token;
    return {value, token, false};
}

RowMax row_max_reference(const float* logits, std::int32_t vocab) {
    RowMax best{logits[0], 0, false};
    for (std::int32_t i = 0; i < vocab; ++i) {
        if (std::isnan(logits[i])) return {0, 0, true};
        if (logits[i] > best.value) best = {logits[i], i, false};
    }
    return best;
}

}  // namespace optimc
