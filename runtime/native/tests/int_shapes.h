// The weights that tests of integer products run over.
#pragma once

#include <string>

#include "kernels/types.h"
#include "tests/packing.h"

namespace optimc::test {

struct IntShape {
    std::int64_t outputs;  // after the gate
    std::int64_t features;
    std::int64_t group;
    Gate gate = Gate::none;
    bool bias = false;
    bool residual = false;
};

// Partial panels, features and groups that are no multiple of 8, ragged last groups, one group for the whole row.
inline const IntShape kIntShapes[] = {
    {1, 5, 5},
    {33, 40, 8, Gate::none, true, false},
    {64, 100, 24, Gate::none, false, true},
    {100, 192, 32, Gate::none, true, true},
    {70, 160, 64},
    {40, 300, 128, Gate::none, true, true},
    {64, 137, 137},
    {40, 64, 32, Gate::silu},
    {1, 72, 24, Gate::gelu, true},
    {32, 33, 5, Gate::gelu_tanh, true},
    {70, 40, 32, Gate::relu},
    {47, 64, 64, Gate::sigmoid, true},
    {70, 96, 16, Gate::silu, true},
    {40, 448, 192, Gate::none, true, true},
    {32, 1088, 1088, Gate::none, false, true},
};

// Rows of the weight as stored: with a gate both halves, the first padded to whole panels.
inline std::int64_t stored_outputs(const IntShape& shape) {
    if (shape.gate == Gate::none) return shape.outputs;
    return shape.outputs + (shape.outputs + kPanelRows - 1) / kPanelRows * kPanelRows;
}

// Calls run(shape, plain weight, what it is) for every shape and kind of weight.
template <class Run>
void for_all_int_weights(Run run) {
    std::mt19937 random(1);
    for (const IntShape& shape : kIntShapes) {
        for (int kind = 0; kind < 8; ++kind) {
            const int bits = kind & 1 ? 8 : 4;
            const bool zeros = kind & 2, wide = kind & 4;
            run(shape, random_weight(stored_outputs(shape), shape.features, shape.group, bits, zeros, wide, random),
                std::to_string(shape.outputs) + "x" + std::to_string(shape.features) + " group " +
                    std::to_string(shape.group) + " bits " + std::to_string(bits) + (zeros ? " zeros" : "") +
                    (wide ? " wide" : ""));
        }
    }
}

}  // namespace optimc::test
