// The softmax of one query row over some of its keys: weighted values that are not yet divided by the weights' sum.
#pragma once

#include "kernels/attention_units.h"
#include "kernels/vec_math.h"

namespace optimc::OPTIMC_ISA {

// `values` [Dp] = sum of e^(score - largest) * value, `sum` = sum of e^(score - largest). No key: sum 0.
struct RowState {
    float* values;
    float* largest;
    float* sum;
};

inline void clear_row(const RowState& row, int width) {
    for (int i = 0; i < width; i += kLanes) store(row.values + i, zero());
    *row.largest = -__builtin_inff();
    *row.sum = 0.0f;
}

// row = row and the keys of one more split. The only place where splits meet, so whoever merges gets the same bits.
inline void merge_split(const RowState& row, const float* values, float largest, float sum, int width) {
    if (sum == 0.0f) return;
    const float both = largest > *row.largest ? largest : *row.largest;
    const Vec old = exp(broadcast(*row.largest - both));
    const Vec fresh = exp(broadcast(largest - both));
    for (int i = 0; i < width; i += kLanes) {
        store(row.values + i, fma(load(values + i), fresh, load(row.values + i) * old));
    }
    float factors[2 * kLanes];
    store(factors, old);
    store(factors + kLanes, fresh);
    *row.largest = both;
    *row.sum = *row.sum * factors[0] + sum * factors[kLanes];
}

// out [D] = the weighted mean of the values.
inline void finish_row(const RowState& row, float* out, int head_dim) {
    const Vec sum = broadcast(*row.sum);
    for (int i = 0; i < head_dim; i += kLanes) {
        const int n = head_dim - i < kLanes ? head_dim - i : kLanes;
        store_first(out + i, load(row.values + i) / sum, n);
    }
}

}  // namespace optimc::OPTIMC_ISA
