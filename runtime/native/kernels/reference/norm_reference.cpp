#include "kernels/reference/norm_reference.h"

#include <cmath>

namespace optimc::reference {

void norm(const Norm& norm, ConstRows x, ConstRows before, ConstRows after, Rows sum, Rows out, std::int64_t rows) {
    const auto optional = [](ConstRows from, std::int64_t row, std::int64_t column) {
        return from.data == nullptr ? 0.0f : from.data[row * from.stride + column];
    };
    const auto width = static_cast<double>(norm.width);
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t begin = 0; begin < norm.heads * norm.width; begin += norm.width) {
            // In float32, as the value that later layers see.
            const auto input = [&](std::int64_t i) {
                return x.data[row * x.stride + begin + i] + optional(before, row, begin + i);
            };
            double mean = 0;
            if (norm.centred) {
                for (std::int64_t i = 0; i < norm.width; ++i) mean += input(i);
                mean /= width;
            }
            double variance = 0;
            for (std::int64_t i = 0; i < norm.width; ++i) variance += (input(i) - mean) * (input(i) - mean);
            variance /= width;
            for (std::int64_t i = 0; i < norm.width; ++i) {
                const double scaled = (input(i) - mean) / std::sqrt(variance + norm.epsilon) * norm.weight[i];
                const double bias = norm.bias == nullptr ? 0 : norm.bias[i];
                if (sum.data != nullptr) sum.data[row * sum.stride + begin + i] = input(i);
                out.data[row * out.stride + begin + i] =
                    static_cast<float>(optional(after, row, begin + i) + (scaled + bias));
            }
        }
    }
}

}  // namespace optimc::reference
