#include "kernels/reference/float_elements.h"

#include <bit>
#include <cmath>
#include <limits>

namespace optimc::reference {

float from_bfloat16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

float from_float16(std::uint16_t bits) {
    const int exponent = bits >> 10 & 31;
    const int fraction = bits & 1023;
    float size;
    if (exponent == 0) {
        size = std::ldexp(static_cast<float>(fraction), -24);
    } else if (exponent < 31) {
        size = std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
    } else {
        size = fraction == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
    }
    return bits & 0x8000 ? -size : size;
}

float element(const void* data, FloatType type, std::int64_t index) {
    switch (type) {
        case FloatType::float32: return static_cast<const float*>(data)[index];
        case FloatType::bfloat16: return from_bfloat16(static_cast<const std::uint16_t*>(data)[index]);
        case FloatType::float16: return from_float16(static_cast<const std::uint16_t*>(data)[index]);
    }
    return 0;
}

std::size_t element_bytes(FloatType type) { return type == FloatType::float32 ? 4 : 2; }

}  // namespace optimc::reference
