// Filters as cutoffs. Tokens are ordered by distance from the row maximum, nearest first, equal ones by id; top_k, top_p
// and min_p each keep a beginning of that order, so each is one point in it and all together are the nearest point.
#pragma once

#include <cstdint>
#include <limits>

namespace optimc {

// Keeps tokens nearer than `distance`, and of those exactly there the ones up to id `token`.
struct Cutoff {
    float distance = std::numeric_limits<float>::infinity();
    std::int32_t token = std::numeric_limits<std::int32_t>::max();

    bool keeps(float other_distance, std::int32_t other_token) const {
        return other_distance < distance || (other_distance == distance && other_token <= token);
    }
};

// Buffers for one row, allocated by the caller: `tokens` holds vocab ids, `blocks` 2 * cutoff_blocks(vocab) keys,
// `bins` kCutoffBins sums.
constexpr std::int32_t kCutoffBins = 4096;
constexpr std::int32_t kCutoffBlock = 32;
constexpr std::int32_t cutoff_blocks(std::int32_t vocab) { return (vocab + kCutoffBlock - 1) / kCutoffBlock; }

struct CutoffScratch {
    std::int32_t* tokens;
    std::int32_t* blocks;
    double* bins;
};

// Keeps exactly `count` tokens (1 <= count <= vocab).
Cutoff cutoff_by_count(const float* logits, std::int32_t vocab, float max, std::int32_t count, CutoffScratch scratch);
Cutoff cutoff_by_count_reference(const float* logits, std::int32_t vocab, float max, std::int32_t count);

// Keeps the fewest tokens whose weights sum to at least `share` (0 < share < 1) of all weights, which are those of
// softmax_weights at `temperature`, or 0.
Cutoff cutoff_by_mass(const float* logits, const float* weights, std::int32_t vocab, float max, float temperature,
                      float share, CutoffScratch scratch);
Cutoff cutoff_by_mass_reference(const float* logits, const float* weights, std::int32_t vocab, float max, float share);

// Sets the weights of tokens beyond the cutoff to 0.
void drop_beyond(const float* logits, std::int32_t vocab, float max, Cutoff cutoff, float* weights);

}  // namespace optimc
