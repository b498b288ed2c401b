// The largest logit of a row, where it stands, and whether the row holds a NaN: all greedy sampling needs.
#pragma once

#include <cstdint>

namespace optimc {

struct RowMax {
    float value;         // -inf if every logit is
    std::int32_t token;  // lowest id among equals
    bool has_nan;        // then value and token are 0
};

RowMax row_max(const float* logits, std::int32_t vocab);
RowMax row_max_reference(const float* logits, std::int32_t vocab);

}  // namespace optimc
