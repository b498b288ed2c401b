// The end of a product: a tile of sums becomes output. Shared by the linear kernels.
#pragma once

#include "kernels/types.h"
#include "kernels/vec_math.h"

namespace optimc::OPTIMC_ISA {

inline Vec apply_gate(Gate gate, Vec x) {
    switch (gate) {
        case Gate::silu: return silu(x);
        case Gate::gelu: return gelu(x);
        case Gate::gelu_tanh: return gelu_tanh(x);
        case Gate::relu: return max(zero(), x);
        case Gate::sigmoid: return sigmoid(x);
        case Gate::none: break;
    }
    return x;
}

// Store the products of row `row` with panel `panel`: `sums` holds 32 of them.
inline void finish_panel(const Epilogue& e, std::int64_t row, std::int64_t panel, const float* sums) {
    const std::int64_t column = panel * kPanelRows;
    float* out = e.out.data + row * e.out.stride + column;
    for (int i = 0; i < kPanelRows; i += kLanes) {
        const std::int64_t left = e.outputs - column - i;
        if (left <= 0) return;
        const int count = left < kLanes ? static_cast<int>(left) : kLanes;
        Vec value = load(sums + i);
        if (e.bias != nullptr) value = value + load(e.bias + column + i);
        if (e.residual.data != nullptr) {
            value = load_first(e.residual.data + row * e.residual.stride + column + i, count) + value;
        }
        store_first(out + i, value, count);
    }
}

// The same for a gate panel and the up panel after it; `pair` counts pairs of panels.
inline void finish_gated_pair(const Epilogue& e, std::int64_t row, std::int64_t pair, const float* gate_sums,
                              const float* up_sums) {
    const std::int64_t column = pair * kPanelRows;
    float* out = e.out.data + row * e.out.stride + column;
    for (int i = 0; i < kPanelRows; i += kLanes) {
        const std::int64_t left = e.outputs - column - i;
        if (left <= 0) return;
        Vec gate = load(gate_sums + i);
        Vec up = load(up_sums + i);
        if (e.bias != nullptr) {
            gate = gate + load(e.bias + 2 * column + i);
            up = up + load(e.bias + 2 * column + kPanelRows + i);
        }
        store_first(out + i, apply_gate(e.gate, gate) * up, left < kLanes ? static_cast<int>(left) : kLanes);
    }
}

// Store the products of rows [row, row + rows) with panel `panel`, or with the gate panel `panel` and the up panel after
// it. sums[rows][32] are the panel's, up_sums[rows][32] those of the up panel, which only a gate reads.
inline void finish_rows(const Epilogue& e, std::int64_t row, std::int64_t rows, std::int64_t panel, const float* sums,
                        const float* up_sums) {
    for (std::int64_t r = 0; r < rows; ++r) {
        if (e.gate == Gate::none) {
            finish_panel(e, row + r, panel, sums + r * kPanelRows);
        } else {
            finish_gated_pair(e, row + r, panel / 2, sums + r * kPanelRows, up_sums + r * kPanelRows);
        }
    }
}

}  // namespace optimc::OPTIMC_ISA
