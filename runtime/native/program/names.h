// The words a program section uses for what the kernels have enumerations for.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <utility>

#include "kernels/elementwise.h"
#include "kernels/types.h"
#include "require.h"
#include "program/workspace.h"

namespace optimc {

template <typename T, std::size_t N>
using Names = std::array<std::pair<const char*, T>, N>;

inline constexpr Names<FloatType, 3> kFloatTypes{{
    {"float32", FloatType::float32},
    {"bfloat16", FloatType::bfloat16},
    {"float16", FloatType::float16},
}};
inline constexpr Names<KvType, 4> kKvTypes{{
    {"float32", KvType::float32},
    {"bfloat16", KvType::bfloat16},
    {"int8", KvType::int8},
    {"int4", KvType::int4},
}};
// Whose scales keys have; true: channels'.
inline constexpr Names<bool, 2> kKeyScales{{
    {"token", false},
    {"channel", true},
}};
inline constexpr Names<RowsKind, 2> kRowsKinds{{
    {"tokens", RowsKind::tokens},
    {"logits", RowsKind::logits},
}};
inline constexpr Names<Gate, 6> kGates{{
    {"none", Gate::none},
    {"silu", Gate::silu},
    {"gelu", Gate::gelu},
    {"gelu_tanh", Gate::gelu_tanh},
    {"relu", Gate::relu},
    {"sigmoid", Gate::sigmoid},
}};
inline constexpr Names<ElementwiseOp, 26> kElementwiseOps{{
    {"rows", ElementwiseOp::rows},
    {"vector", ElementwiseOp::vector},
    {"constant", ElementwiseOp::constant},
    {"add", ElementwiseOp::add},
    {"sub", ElementwiseOp::sub},
    {"mul", ElementwiseOp::mul},
    {"div", ElementwiseOp::div},
    {"min", ElementwiseOp::min},
    {"max", ElementwiseOp::max},
    {"pow", ElementwiseOp::pow},
    {"neg", ElementwiseOp::neg},
    {"abs", ElementwiseOp::abs},
    {"sqrt", ElementwiseOp::sqrt},
    {"reciprocal", ElementwiseOp::reciprocal},
    {"exp", ElementwiseOp::exp},
    {"log", ElementwiseOp::log},
    {"sigmoid", ElementwiseOp::sigmoid},
    {"silu", ElementwiseOp::silu},
    {"tanh", ElementwiseOp::tanh},
    {"erf", ElementwiseOp::erf},
    {"gelu", ElementwiseOp::gelu},
    {"gelu_tanh", ElementwiseOp::gelu_tanh},
    {"relu", ElementwiseOp::relu},
    {"softplus", ElementwiseOp::softplus},
    {"sin", ElementwiseOp::sin},
    {"cos", ElementwiseOp::cos},
}};

// What `name` stands for. Throws std::invalid_argument naming the known ones; `what` says what they are names of.
template <typename T, std::size_t N>
T named(const Names<T, N>& names, const std::string& name, const char* what) {
    std::string list;
    for (const auto& [known, value] : names) {
        if (name == known) return value;
        list += std::string(list.empty() ? "" : ", ") + known;
    }
    refuse(std::string("no ") + what + " '" + name + "'; use one of " + list);
}

}  // namespace optimc
