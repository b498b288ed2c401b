#include "kernels/reference/linear_float_reference.h"

#include <vector>

#include "kernels/reference/epilogue_reference.h"
#include "kernels/reference/float_elements.h"

namespace optimc::reference {

float weight_element(const FloatWeight& weight, std::int64_t n, std::int64_t c) {
    const std::int64_t panel = n / kPanelRows;
    return element(weight.data, weight.type, (panel * weight.features + c) * kPanelRows + n % kPanelRows);
}

void linear_float(const FloatWeight& weight, ConstRows x, const Epilogue& epilogue, std::int64_t rows) {
    std::vector<double> products(static_cast<std::size_t>(weight.panels() * kPanelRows));
    for (std::int64_t m = 0; m < rows; ++m) {
        for (std::size_t n = 0; n < products.size(); ++n) {
            double sum = 0;
            for (std::int64_t c = 0; c < weight.features; ++c) {
                sum += static_cast<double>(x.data[m * x.stride + c]) *
                       weight_element(weight, static_cast<std::int64_t>(n), c);
            }
            products[n] = sum;
        }
        finish_row(epilogue, m, products.data());
    }
}

}  // namespace optimc::reference
