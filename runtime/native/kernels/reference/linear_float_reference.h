// Products with floating-point weights, in float64.
#pragma once

#include "kernels/types.h"

namespace optimc::reference {

// Element [n, c] of a weight in panels; n counts stored rows, padding included.
float weight_element(const FloatWeight& weight, std::int64_t n, std::int64_t c);

// Rows [0, rows) of x [rows, features] with all panels.
void linear_float(const FloatWeight& weight, ConstRows x, const Epilogue& epilogue, std::int64_t rows);

}  // namespace optimc::reference
