// Activations to 8 bits, in float64.
#pragma once

#include "kernels/types.h"

namespace optimc::reference {

// Rows [0, rows) of x [rows, features]. A code may differ by one from the kernel's where x / scale lies between two.
void quantize_rows(ConstRows x, std::int64_t features, std::int64_t group, const std::int32_t* permutation,
                   float fixed_scale, const QuantizedRows& out, std::int64_t rows);

}  // namespace optimc::reference
