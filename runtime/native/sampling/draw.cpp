#include "sampling/draw.h"

#include <algorithm>
#include <cassert>

namespace optimc {

namespace {

constexpr int kLanes = 16;

double block_sum(const float* weights, std::int32_t count) {
    float lanes[kLanes] = {};
    std::int32_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        for (int j = 0; j < kLanes; ++j) lanes[j] += weights[i + j];
    }
    for (; i < count; ++i) lanes[0] += weights[i];
    double sum = 0;
    for (float lane : lanes) sum += lane;
    return sum;
}

// First token with which the running sum exceeds `target`; the last of positive weight if rounding lets none.
std::int32_t walk(const float* weights, std::int32_t count, double target) {
    double sum = 0;
    std::int32_t last = 0;
    for (std::int32_t i = 0; i < count; ++i) {
        if (weights[i] == 0) continue;
        last = i;
        sum += weights[i];
        if (sum > target) break;
    }
    return last;
}

}  // namespace

std::int32_t draw(const float* weights, std::int32_t vocab, double uniform, double* block_sums) {
    const std::int32_t blocks = draw_blocks(vocab);
    double total = 0;
    for (std::int32_t block = 0; block < blocks; ++block) {
        const std::int32_t start = block * kDrawBlock;
        block_sums[block] = block_sum(weights + start, std::min(kDrawBlock, vocab - start));
        total += block_sums[block];
    }
    assert(total > 0);
    double target = uniform * total;
    std::int32_t chosen = 0;
    for (std::int32_t block = 0; block < blocks; ++block) {
        if (block_sums[block] == 0) continue;
        chosen = block;
        if (block_sums[block] > target) break;
        if (block + 1 < blocks) target -= block_sums[block];
    }
    const std::int32_t start = chosen * kDrawBlock;
    return start + walk(weights + start, std::min(kDrawBlock, vocab - start), target);
}

std::int32_t draw_reference(const float* weights, std::int32_t vocab, double uniform) {
    double total = 0;
    for (std::int32_t i = 0; i < vocab; ++i) total += weights[i];
    return walk(weights, vocab, uniform * total);
}

}  // namespace optimc
