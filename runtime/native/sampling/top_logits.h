// The few largest logits of a row, for reported alternatives.
#pragma once

#include <cstdint>

namespace optimc {

// Writes the ids of the `count` largest logits (1 <= count <= vocab), largest first, equal ones by id. The row holds no
// NaN. Meant for small counts: the cost is one pass plus count steps per token that enters the list.
void top_logits(const float* logits, std::int32_t vocab, std::int32_t count, std::int32_t* tokens);

}  // namespace optimc
