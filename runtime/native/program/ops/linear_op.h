// A product with a weight, split over threads by panels of output features and, where rows are many, by rows first.
#pragma once

#include <optional>
#include <variant>

#include "program/op.h"

namespace optimc {

class LinearOp final : public Op {
  public:
    // `x` is a view of float32 rows or the index of a quantized buffer; a FloatWeight takes the former only.
    LinearOp(std::variant<IntWeight, FloatWeight> weight, std::variant<View, int> x, const float* bias,
             std::optional<View> residual, Gate gate, View out)
        : weight_(weight), x_(x), bias_(bias), residual_(residual), gate_(gate), out_(out) {}
    void run(const Context& context, int thread) override;
    std::size_t scratch_bytes(const Kernels& kernels) const override;

  private:
    std::variant<IntWeight, FloatWeight> weight_;
    std::variant<View, int> x_;
    const float* bias_;
    std::optional<View> residual_;
    Gate gate_;
    View out_;
};

}  // namespace optimc
