// The likeliest candidates of many rows: what draft heads propose.
#pragma once

#include <cstdint>

namespace optimc {

// Writes for each row of logits [rows, vocab] the ids of the `count` largest (1 <= count <= vocab), largest first, equal
// ones by id, and their log-probabilities, both [rows, count]. A row that holds a NaN or no finite largest logit gets
// the first ids, each with a log-probability of minus infinity: nothing to rely on.
void top_rows(const float* logits, std::int64_t rows, std::int32_t vocab, std::int32_t count, std::int32_t* ids,
              float* logprobs);

}  // namespace optimc
