// Operations whose work is split by rows.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "program/op.h"

namespace optimc {

// A row-major [V, features] matrix.
struct Table {
    const void* data;
    FloatType type;
    std::int64_t rows;
    std::int64_t features;
};

// What rows can be looked up in.
using EmbeddingTable = std::variant<Table, FloatWeight, IntWeight>;

class EmbedOp final : public Op {
  public:
    EmbedOp(EmbeddingTable table, float scale, View out) : table_(table), scale_(scale), out_(out) {}
    void run(const Context& context, int thread) override;

  private:
    EmbeddingTable table_;
    float scale_;
    View out_;
};

class NormOp final : public Op {
  public:
    NormOp(const Norm& norm, View x, std::optional<View> before, std::optional<View> after, std::optional<View> sum,
           std::optional<View> out, std::optional<int> quantized, const std::int32_t* permutation, float fixed_scale)
        : norm_(norm), x_(x), before_(before), after_(after), sum_(sum), out_(out), quantized_(quantized),
          permutation_(permutation), fixed_scale_(fixed_scale) {}
    void run(const Context& context, int thread) override;
    bool is_private(const Context& context) const override;
    std::size_t scratch_bytes(const Kernels& kernels) const override;

  private:
    Norm norm_;
    View x_;
    std::optional<View> before_, after_, sum_, out_;
    std::optional<int> quantized_;
    const std::int32_t* permutation_;
    float fixed_scale_;  // of the quantized buffer; 0: as its rows ask for
};

class QuantizeOp final : public Op {
  public:
    QuantizeOp(View x, int quantized, const std::int32_t* permutation, float fixed_scale)
        : x_(x), quantized_(quantized), permutation_(permutation), fixed_scale_(fixed_scale) {}
    void run(const Context& context, int thread) override;
    bool is_private(const Context& context) const override;
    std::size_t scratch_bytes(const Kernels& kernels) const override;

  private:
    View x_;
    int quantized_;
    const std::int32_t* permutation_;
    float fixed_scale_;
};

// out = scale * (cos, sin)(position * frequency), all in float32 as the model's own code computes them.
class RotationOp final : public Op {
  public:
    RotationOp(const float* frequencies, float scale, View out)
        : frequencies_(frequencies), scale_(scale), out_(out) {}
    void run(const Context& context, int thread) override;

  private:
    const float* frequencies_;
    float scale_;
    View out_;
};

class ElementwiseOperation final : public Op {
  public:
    ElementwiseOperation(std::vector<ElementwiseStep> steps, std::vector<View> inputs,
                         std::vector<const float*> vectors, View out)
        : steps_(std::move(steps)), inputs_(std::move(inputs)), vectors_(std::move(vectors)), out_(out) {}
    void run(const Context& context, int thread) override;

  private:
    std::vector<ElementwiseStep> steps_;
    std::vector<View> inputs_;
    std::vector<const float*> vectors_;
    View out_;
};

// out[r] = x[logits_rows[r]].
class GatherRowsOp final : public Op {
  public:
    GatherRowsOp(View x, View out) : x_(x), out_(out) {}
    void run(const Context& context, int thread) override;

  private:
    View x_;
    View out_;
};

// out[t, j] = x[t, permutation[j]].
class PermuteOp final : public Op {
  public:
    PermuteOp(View x, const std::int32_t* permutation, View out) : x_(x), permutation_(permutation), out_(out) {}
    void run(const Context& context, int thread) override;

  private:
    View x_;
    const std::int32_t* permutation_;
    View out_;
};

}  // namespace optimc
