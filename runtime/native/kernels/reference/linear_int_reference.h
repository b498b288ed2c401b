// Products with weights in integer codes: integer sums exactly, everything else in float64.
#pragma once

#include "kernels/types.h"

namespace optimc::reference {

struct IntElement {
    int code;
    int zero;
    float scale;
};

// Element [n, c] of a weight in panels; n counts stored rows, padding included.
IntElement int_element(const IntWeight& weight, std::int64_t n, std::int64_t c);

// Rows [0, rows) of quantized activations with all panels.
void linear_int(const IntWeight& weight, const QuantizedRows& x, const Epilogue& epilogue, std::int64_t rows);

// Rows [0, rows) of x [rows, features] with all panels.
void linear_int_exact(const IntWeight& weight, ConstRows x, const Epilogue& epilogue, std::int64_t rows);

}  // namespace optimc::reference
