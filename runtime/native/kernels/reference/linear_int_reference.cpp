#include "kernels/reference/linear_int_reference.h"

#include <cstring>
#include <vector>

#include "kernels/reference/epilogue_reference.h"
#include "kernels/reference/float_elements.h"

namespace optimc::reference {

IntElement int_element(const IntWeight& weight, std::int64_t n, std::int64_t c) {
    const std::int64_t g = c / weight.group;
    const std::int64_t i = c % weight.group;
    const std::int64_t row = n % kPanelRows;
    const std::int64_t full_group = weight.group_header_bytes() + weight.code_bytes(padded_group(weight.group));
    const std::uint8_t* scales = weight.data + n / kPanelRows * weight.panel_bytes() + g * full_group;
    const std::uint8_t* zeros = scales + kPanelRows * (weight.wide_scales ? 4 : 2);
    const std::uint8_t* codes = scales + weight.group_header_bytes();

    IntElement result;
    if (weight.wide_scales) {
        std::memcpy(&result.scale, scales + 4 * row, 4);
    } else {
        std::uint16_t bits;
        std::memcpy(&bits, scales + 2 * row, 2);
        result.scale = from_float16(bits);
    }
    result.zero = weight.has_zeros ? zeros[row] : weight.zero_point;
    if (weight.bits == 8) {
        result.code = codes[i / 4 * 128 + row * 4 + i % 4];
    } else {
        const int byte = codes[i / 8 * 128 + row * 4 + i % 4];
        result.code = i % 8 < 4 ? byte % 16 : byte / 16;
    }
    return result;
}

void linear_int(const IntWeight& weight, const QuantizedRows& x, const Epilogue& epilogue, std::int64_t rows) {
    std::vector<double> products(static_cast<std::size_t>(weight.panels() * kPanelRows));
    for (std::int64_t m = 0; m < rows; ++m) {
        for (std::size_t n = 0; n < products.size(); ++n) {
            products[n] = 0;
            for (std::int64_t g = 0; g < weight.groups(); ++g) {
                std::int64_t sum = 0;
                double scale = 0;
                for (std::int64_t i = 0; i < weight.group_features(g); ++i) {
                    const IntElement w = int_element(weight, static_cast<std::int64_t>(n), g * weight.group + i);
                    sum += (w.code - w.zero) * x.codes[m * x.stride + g * padded_group(weight.group) + i];
                    scale = w.scale;
                }
                products[n] += static_cast<double>(sum) * scale * x.scales[m * x.groups + g];
            }
        }
        finish_row(epilogue, m, products.data());
    }
}

void linear_int_exact(const IntWeight& weight, ConstRows x, const Epilogue& epilogue, std::int64_t rows) {
    std::vector<double> products(static_cast<std::size_t>(weight.panels() * kPanelRows));
    for (std::int64_t m = 0; m < rows; ++m) {
        for (std::size_t n = 0; n < products.size(); ++n) {
            products[n] = 0;
            for (std::int64_t c = 0; c < weight.features; ++c) {
                const IntElement w = int_element(weight, static_cast<std::int64_t>(n), c);
                products[n] += static_cast<double>(w.code - w.zero) * w.scale * x.data[m * x.stride + c];
            }
        }
        finish_row(epilogue, m, products.data());
    }
}

}  // namespace optimc::reference
