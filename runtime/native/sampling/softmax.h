// Unnormalised softmax weights of a row, and the normaliser of its log-softmax.
#pragma once

#include <cstdint>

namespace optimc {

// weights[i] = exp(-(max - logits[i]) / temperature), so the likeliest token weighs 1. `max` is the finite row maximum.
void softmax_weights(const float* logits, std::int32_t vocab, float max, float temperature, float* weights);
void softmax_weights_reference(const float* logits, std::int32_t vocab, float max, float temperature, float* weights);

// log(sum(exp(logits[i] - max))), to be subtracted from logits[i] - max.
double log_sum_exp(const float* logits, std::int32_t vocab, float max);
double log_sum_exp_reference(const float* logits, std::int32_t vocab, float max);

}  // namespace optimc
