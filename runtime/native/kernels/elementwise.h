// Element by element: an expression over rows, vectors and numbers, evaluated without intermediate rows in memory.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/types.h"

namespace optimc {

enum class ElementwiseOp : int {
    rows,      // element of input `a`
    vector,    // element of vector `a` (one value per column, the same in every row)
    constant,  // `value`
    add, sub, mul, div, min, max, pow,                                                       // of steps a and b
    neg, abs, sqrt, reciprocal, exp, log, sigmoid, silu, tanh, erf, gelu, gelu_tanh, relu, softplus, sin, cos,  // of a
};

constexpr bool is_binary(ElementwiseOp op) { return ElementwiseOp::add <= op && op <= ElementwiseOp::pow; }

constexpr int kMaxElementwiseSteps = 32;

// Step i computes value i from earlier ones; the last step's value is the result.
struct ElementwiseStep {
    ElementwiseOp op;
    int a;
    int b;
    float value;
};

struct Elementwise {
    std::span<const ElementwiseStep> steps;   // at most kMaxElementwiseSteps
    std::span<const ConstRows> inputs;
    std::span<const float* const> vectors;    // [width] each
    std::int64_t width;
    Rows out;  // may be one of the inputs
};

}  // namespace optimc
