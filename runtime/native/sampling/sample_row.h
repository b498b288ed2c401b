// One row of logits to one token: penalties, bias, bans, then argmax or temperature, top_k, top_p, min_p and a draw.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace optimc {

struct RowParams {
    float temperature;         // 0: greedy
    std::int32_t top_k;        // 0: all
    float top_p;               // 1: all
    float min_p;               // 0: all
    float repetition_penalty;  // 1: none
    float presence_penalty;
    float frequency_penalty;
    std::uint64_t seed;
    std::uint64_t position;                     // in the output
    std::span<const std::int32_t> seen_tokens;  // distinct tokens of prompt and output
    std::span<const std::int32_t> seen_counts;  // occurrences in the output
    std::span<const std::int32_t> bias_tokens;
    std::span<const float> biases;
    std::span<const std::int32_t> banned_tokens;
    std::int32_t num_logprobs;  // -1: none at all; n: the chosen token's and those of the n likeliest
};

enum class RowStatus : std::uint8_t { ok = 0, nan = 1, empty = 2 };

struct RowResult {
    std::int32_t* token;
    float* logprob;              // of the chosen token, under the log-softmax of the unmodified logits
    std::int32_t* top_tokens;    // [num_logprobs]
    float* top_logprobs;         // [num_logprobs]
};

// Buffers for rows of up to `vocab` logits, kept between calls.
class RowScratch {
public:
    void reserve(std::int32_t vocab);

    std::vector<float> logits;
    std::vector<float> weights;
    std::vector<std::int32_t> tokens;
    std::vector<std::int32_t> blocks;
    std::vector<double> sums;
};

// Which tokens may be chosen: bit i % 32 of word i / 32 is token i's. nullptr leaves all. Log-probabilities that are
// reported do not know of it, as they do not of any other edit.
using RowMask = const std::uint32_t*;
constexpr std::size_t mask_words(std::int32_t vocab) { return (static_cast<std::size_t>(vocab) + 31) / 32; }

// `logits` [vocab] is only read. On a status other than ok nothing is written. Token ids in `params` are in range.
RowStatus sample_row(const float* logits, std::int32_t vocab, const RowParams& params, RowMask allowed,
                     RowScratch& scratch, RowResult result);

// Reports a token that was chosen otherwise, *result.token, as sample_row does. The row holds no NaN.
void report_token(const float* logits, std::int32_t vocab, std::int32_t num_logprobs, RowResult result);

struct RowSpread {
    RowStatus status;
    double total;    // of all tokens' weights
    double entropy;  // in nats
};

// How likely each token is after edits and temperature (> 0): scratch.weights holds `vocab` unnormalised probabilities,
// 0 for those that top_k, top_p or min_p leave out; total and entropy are of all of them.
RowSpread row_spread(const float* logits, std::int32_t vocab, const RowParams& params, RowMask allowed,
                     RowScratch& scratch);

}  // namespace optimc
