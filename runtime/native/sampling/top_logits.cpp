#include "sampling/top_logits.h"

#include <cassert>

namespace optimc {

void top_logits(const float* logits, std::int32_t vocab, std::int32_t count, std::int32_t* tokens) {
    assert(1 <= count && count <= vocab);
    std::int32_t size = 0;
    float last = 0;  // of a full list
    for (std::int32_t i = 0; i < vocab; ++i) {
        // A logit equal to the last one stays behind it, being of a higher id.
        if (size == count && !(logits[i] > last)) continue;
        std::int32_t place = size < count ? size++ : count - 1;
        for (; place > 0 && logits[i] > logits[tokens[place - 1]]; --place) tokens[place] = tokens[place - 1];
        tokens[place] = i;
        last = logits[tokens[size - 1]];
    }
}

}  // namespace optimc
