#include "sampling/softmax.h"

#include <cassert>
#include <cmath>

#include "sampling/exp_negative.h"
#include "sampling/instruction_sets.h"

namespace optimc {

namespace {

constexpr int kLanes = 16;
constexpr std::int32_t kBlock = 1024;  // float partial sums stay short; blocks are joined in double

}  // namespace

OPTIMC_EACH_INSTRUCTION_SET
void softmax_weights(const float* __restrict logits, std::int32_t vocab, float max, float temperature,
                     float* __restrict weights) {
    assert(std::isfinite(max) && temperature > 0);
    // A division, not a multiplication by the inverse: 0 / temperature is 0 however small the temperature.
    for (std::int32_t i = 0; i < vocab; ++i) weights[i] = exp_negative(-((max - logits[i]) / temperature));
}

void softmax_weights_reference(const float* logits, std::int32_t vocab, float max, float temperature,
                               float* weights) {
    for (std::int32_t i = 0; i < vocab; ++i) {
        const double distance = static_cast<double>(max) - logits[i];
        weights[i] = static_cast<float>(std::exp(-distance / temperature));
    }
}

OPTIMC_EACH_INSTRUCTION_SET
double log_sum_exp(const float* logits, std::int32_t vocab, float max) {
    assert(std::isfinite(max));
    double total = 0;
    for (std::int32_t start = 0; start < vocab; start += kBlock) {
        const std::int32_t count = vocab - start < kBlock ? vocab - start : kBlock;
        const float* block = logits + start;
        float lanes[kLanes] = {};
        std::int32_t i = 0;
        for (; i + kLanes <= count; i += kLanes) {
            for (int j = 0; j < kLanes; ++j) lanes[j] += exp_negative(block[i + j] - max);
        }
        for (; i < count; ++i) lanes[0] += exp_negative(block[i] - max);
        for (float lane : lanes) total += lane;
    }
    return std::log(total);
}

double log_sum_exp_reference(const float* logits, std::int32_t vocab, float max) {
    double total = 0;
    for (std::int32_t i = 0; i < vocab; ++i) total += std::exp(static_cast<double>(logits[i]) - max);
    return std::log(total);
}

}  // namespace optimc
