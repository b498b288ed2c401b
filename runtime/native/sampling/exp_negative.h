// e^a for a <= 0 in single precision, written so that loops over it vectorise on any target.
#pragma once

#include <bit>
#include <cstdint>

namespace optimc {

// Relative error below 2^-22 down to -87; 0 below that, where the result would be subnormal or vanish in any sum.
inline float exp_negative(float a) {
    constexpr float lowest = -87.0f;
    constexpr float log2_e = 1.44269504f;
    constexpr float ln2_high = 0.693359375f;  // few bits, so that n * ln2_high is exact
    constexpr float ln2_low = -2.12194440e-4f;
    constexpr float round_to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction bits
    const float clamped = a > lowest ? a : lowest;   // also keeps -inf out of the arithmetic
    const float n = (clamped * log2_e + round_to_integer) - round_to_integer;
    const float r = (clamped - n * ln2_high) - n * ln2_low;  // |r| <= ln(2) / 2
    // Taylor series to the 7th power: the remainder is below 6e-9.
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const std::int32_t exponent = (static_cast<std::int32_t>(n) + 127) << 23;
    const float value = p * std::bit_cast<float>(exponent);
    return a < lowest ? 0.0f : value;
}

}  // namespace optimc
