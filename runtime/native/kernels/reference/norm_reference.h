// RMSNorm and LayerNorm, in float64.
#pragma once

#include "kernels/types.h"

namespace optimc::reference {

// Rows [0, rows): out = after + norm(x + before), sum = x + before; before, after and sum are optional (data nullptr).
// Buffers do not overlap.
void norm(const Norm& norm, ConstRows x, ConstRows before, ConstRows after, Rows sum, Rows out, std::int64_t rows);

}  // namespace optimc::reference
