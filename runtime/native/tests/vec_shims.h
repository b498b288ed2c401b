// kernels/vec.h and kernels/vec_math.h as functions on arrays of sixteen floats, one table per instruction set.
#pragma once

#include <cstdint>

#include "isa/instruction_set.h"

namespace optimc::test {

struct VecShims {
    using Unary = void (*)(const float* a, float* out);
    using Binary = void (*)(const float* a, const float* b, float* out);

    Unary copy, abs, sqrt, round, exp, sigmoid, silu, tanh, erf, gelu, gelu_tanh;
    Binary add, sub, mul, div, min, max, scale_by_power;
    void (*broadcast)(float x, float* out);
    void (*fma)(const float* a, const float* b, const float* c, float* out);
    void (*where_less)(const float* a, const float* b, const float* x, const float* y, float* out);
    void (*where_nan)(const float* a, const float* x, const float* y, float* out);
    void (*first)(int n, const float* a, const float* b, float* out);
    void (*load_first)(const float* p, int n, float* out);
    void (*store_first)(float* p, const float* a, int n);
    void (*load_bf16)(const std::uint16_t* p, float* out);
    void (*load_f16)(const std::uint16_t* p, float* out);
    void (*load_i8)(const std::int8_t* p, float* out);
    void (*load_u8)(const std::uint8_t* p, float* out);
    void (*load_i32)(const std::int32_t* p, float* out);
    void (*store_i8)(std::int8_t* p, const float* a);
    float (*sum)(const float* a);
    float (*largest)(const float* a);
};

const VecShims& vec_shims(InstructionSet set);

const VecShims* vec_shims_portable();
const VecShims* vec_shims_avx2();
const VecShims* vec_shims_avx512();

}  // namespace optimc::test
