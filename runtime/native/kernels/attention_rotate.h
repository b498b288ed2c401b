// Rotary position embedding of one head.
#pragma once

#include "kernels/attention.h"
#include "kernels/vec.h"

namespace optimc::OPTIMC_ISA {

// out [D] = x [D] with its first rotary_dim elements turned in pairs: (a, b) becomes (a cos - b sin, b cos + a sin).
// `table` is the token's row of AttentionCall::rotation. Every product is rounded by itself, so all sets agree.
inline void rotate(const AttentionSpec& spec, const float* x, const float* table, float* out) {
    const int half = spec.rotary_dim / 2;
    const float* sine = table + half;
    if (spec.interleaved) {
        for (int i = 0; i < half; ++i) {
            const float a = x[2 * i], b = x[2 * i + 1];
            out[2 * i] = a * table[i] - b * sine[i];
            out[2 * i + 1] = b * table[i] + a * sine[i];
        }
    } else {
        // Whole vectors are not stored through a mask: what reads them next would wait for it.
        int i = 0;
        for (; i + kLanes <= half; i += kLanes) {
            const Vec a = load(x + i), b = load(x + half + i), c = load(table + i), s = load(sine + i);
            store(out + i, a * c - b * s);
            store(out + half + i, b * c + a * s);
        }
        if (i < half) {
            const int n = half - i;
            const Vec a = load_first(x + i, n), b = load_first(x + half + i, n);
            const Vec c = load_first(table + i, n), s = load_first(sine + i, n);
            store_first(out + i, a * c - b * s, n);
            store_first(out + half + i, b * c + a * s, n);
        }
    }
    for (int i = spec.rotary_dim; i < spec.head_dim; ++i) out[i] = x[i];
}

}  // namespace optimc::OPTIMC_ISA
