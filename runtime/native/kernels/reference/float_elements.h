// Single floating-point elements of any stored type.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace optimc::reference {

float from_bfloat16(std::uint16_t bits);
// IEEE binary16.
float from_float16(std::uint16_t bits);

// Element `index` of an array of `type`.
float element(const void* data, FloatType type, std::int64_t index);

std::size_t element_bytes(FloatType type);

}  // namespace optimc::reference
