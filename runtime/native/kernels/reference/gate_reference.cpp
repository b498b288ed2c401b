#include "kernels/reference/gate_reference.h"

#include <cmath>
#include <numbers>

namespace optimc::reference {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

double silu(double x) { return x / (1 + std::exp(-x)); }

double gelu(double x) { return x * std::erfc(-x / std::numbers::sqrt2) / 2; }

double gelu_tanh(double x) {
    // (1 + tanh u) / 2 = sigmoid(2u), which does not cancel.
    return x * sigmoid(2 * std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x));
}

double gate(Gate kind, double x) {
    switch (kind) {
        case Gate::none: return x;
        case Gate::silu: return silu(x);
        case Gate::gelu: return gelu(x);
        case Gate::gelu_tanh: return gelu_tanh(x);
        case Gate::relu: return x < 0 ? 0 : x;
        case Gate::sigmoid: return sigmoid(x);
    }
    return x;
}

}  // namespace optimc::reference
