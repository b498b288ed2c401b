// A product with a weight, split over threads by panels of output features and, where rows are many, by rows first.
#pragma once

#include <atomic>
#include <memory>
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
    void prepare(const Step& step, Workspace& workspace) override;
    void run(const Context& context, int thread) override;
    std::size_t scratch_bytes(const Kernels& kernels) const override;

  private:
    // Pieces of a thread's part that somebody has begun. A line of its own for each, as owners count all the time.
    struct alignas(64) Begun {
        std::atomic<int> pieces{0};
    };

    void run_part(const Context& context, int thread, Range rows, Range panels) const;

    std::variant<IntWeight, FloatWeight> weight_;
    std::variant<View, int> x_;
    const float* bias_;
    std::optional<View> residual_;
    Gate gate_;
    View out_;
    std::unique_ptr<Begun[]> begun_;  // [threads], from the first step on that needs it
};

}  // namespace optimc
