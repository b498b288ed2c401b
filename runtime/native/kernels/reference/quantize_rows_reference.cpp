#include "kernels/reference/quantize_rows_reference.h"

#include <algorithm>
#include <cmath>

namespace optimc::reference {

void quantize_rows(ConstRows x, std::int64_t features, std::int64_t group, const std::int32_t* permutation,
                   float fixed_scale, const QuantizedRows& out, std::int64_t rows) {
    for (std::int64_t m = 0; m < rows; ++m) {
        std::int8_t* codes = out.codes + m * out.stride;
        std::fill(codes, codes + out.stride, std::int8_t{0});
        for (std::int64_t g = 0; g < out.groups; ++g, codes += padded_group(group)) {
            const auto feature = [&](std::int64_t c) {
                return x.data[m * x.stride + (permutation == nullptr ? c : permutation[c])];
            };
            const std::int64_t end = std::min(features, (g + 1) * group);
            float most = 0;
            bool finite = true;
            for (std::int64_t c = g * group; c < end; ++c) {
                most = std::fmax(most, std::fabs(feature(c)));
                finite = finite && std::isfinite(feature(c));
            }
            std::int32_t sum = 0;
            const double scale = fixed_scale > 0 ? fixed_scale : most / 127.0;
            for (std::int64_t c = g * group; c < end && finite && most > 0; ++c) {
                const double code = std::clamp(std::nearbyint(feature(c) / scale), -127.0, 127.0);
                codes[c - g * group] = static_cast<std::int8_t>(code);
                sum += static_cast<std::int32_t>(code);
            }
            out.scales[m * out.groups + g] = finite ? static_cast<float>(fixed_scale > 0 ? fixed_scale : most / 127) : NAN;
            out.sums[m * out.groups + g] = sum;
        }
    }
}

}  // namespace optimc::reference
