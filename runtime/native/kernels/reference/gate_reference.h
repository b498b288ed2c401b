// Activations in float64, by the C library.
#pragma once

#include "kernels/types.h"

namespace optimc::reference {

double sigmoid(double x);
double silu(double x);
double gelu(double x);
double gelu_tanh(double x);
double gate(Gate kind, double x);

}  // namespace optimc::reference
