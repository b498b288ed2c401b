// Expressions, one element at a time in float64, with the C library's functions.
#pragma once

#include "kernels/elementwise.h"

namespace optimc::reference {

double evaluate(const Elementwise& expression, std::int64_t row, std::int64_t column);

}  // namespace optimc::reference
