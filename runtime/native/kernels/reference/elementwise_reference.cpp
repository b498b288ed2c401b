#include "kernels/reference/elementwise_reference.h"

#include <cmath>
#include <vector>

#include "kernels/reference/gate_reference.h"

namespace optimc::reference {

namespace {

double smaller(double a, double b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b); }
double larger(double a, double b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }

double apply(ElementwiseOp op, double a, double b) {
    switch (op) {
        case ElementwiseOp::add: return a + b;
        case ElementwiseOp::sub: return a - b;
        case ElementwiseOp::mul: return a * b;
        case ElementwiseOp::div: return a / b;
        case ElementwiseOp::min: return smaller(a, b);
        case ElementwiseOp::max: return larger(a, b);
        case ElementwiseOp::pow: return std::pow(a, b);
        case ElementwiseOp::neg: return -a;
        case ElementwiseOp::abs: return std::fabs(a);
        case ElementwiseOp::sqrt: return std::sqrt(a);
        case ElementwiseOp::reciprocal: return 1 / a;
        case ElementwiseOp::exp: return std::exp(a);
        case ElementwiseOp::log: return std::log(a);
        case ElementwiseOp::sigmoid: return sigmoid(a);
        case ElementwiseOp::silu: return silu(a);
        case ElementwiseOp::tanh: return std::tanh(a);
        case ElementwiseOp::erf: return std::erf(a);
        case ElementwiseOp::gelu: return gelu(a);
        case ElementwiseOp::gelu_tanh: return gelu_tanh(a);
        case ElementwiseOp::relu: return a < 0 ? 0 : a;
        case ElementwiseOp::softplus: return larger(a, 0) + std::log1p(std::exp(-std::fabs(a)));
        case ElementwiseOp::sin: return std::sin(a);
        case ElementwiseOp::cos: return std::cos(a);
        case ElementwiseOp::rows:
        case ElementwiseOp::vector:
        case ElementwiseOp::constant: break;
    }
    return NAN;
}

}  // namespace

double evaluate(const Elementwise& expression, std::int64_t row, std::int64_t column) {
    std::vector<double> values;
    for (const ElementwiseStep& step : expression.steps) {
        const auto a = static_cast<std::size_t>(step.a);
        const auto b = static_cast<std::size_t>(step.b);
        if (step.op == ElementwiseOp::rows) {
            values.push_back(expression.inputs[a].data[row * expression.inputs[a].stride + column]);
        } else if (step.op == ElementwiseOp::vector) {
            values.push_back(expression.vectors[a][column]);
        } else if (step.op == ElementwiseOp::constant) {
            values.push_back(step.value);
        } else {
            values.push_back(apply(step.op, values[a], b < values.size() ? values[b] : NAN));
        }
    }
    return values.back();
}

}  // namespace optimc::reference
