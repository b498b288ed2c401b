#include "kernels/reference/epilogue_reference.h"

#include "kernels/reference/gate_reference.h"

namespace optimc::reference {

void finish_row(const Epilogue& epilogue, std::int64_t row, const double* products) {
    const auto biased = [&](std::int64_t i) { return products[i] + (epilogue.bias == nullptr ? 0 : epilogue.bias[i]); };
    for (std::int64_t n = 0; n < epilogue.outputs; ++n) {
        double value;
        if (epilogue.gate == Gate::none) {
            value = biased(n);
            if (epilogue.residual.data != nullptr) value += epilogue.residual.data[row * epilogue.residual.stride + n];
        } else {
            const std::int64_t place = n / kPanelRows * 2 * kPanelRows + n % kPanelRows;
            value = gate(epilogue.gate, biased(place)) * biased(place + kPanelRows);
        }
        epilogue.out.data[row * epilogue.out.stride + n] = static_cast<float>(value);
    }
}

}  // namespace optimc::reference
