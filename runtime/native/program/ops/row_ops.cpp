#include "program/ops/row_ops.h"

#include <array>
#include <cassert>
#include <cmath>
#include <cstring>

namespace optimc {

namespace {

std::int64_t rows_of(const Context& context, const View& view) {
    return context.step.rows(context.workspace.buffer(view).rows);
}

Range my_rows(const Context& context, const View& view, int thread) {
    return share(rows_of(context, view), thread, context.team.size());
}

ConstRows optional_rows(const Context& context, const std::optional<View>& view) {
    return view ? context.workspace.const_rows(*view) : ConstRows{nullptr, 0};
}

}  // namespace

void EmbedOp::run(const Context& context, int thread) {
    const Range rows = my_rows(context, out_, thread);
    const Rows out = context.workspace.rows(out_);
    if (table_.table != nullptr) {
        context.kernels.embed_float(table_.table, table_.type, table_.features, context.step.tokens, scale_, out,
                                    rows.begin, rows.end);
    } else {
        context.kernels.embed_int(table_.codes, context.step.tokens, scale_, out, rows.begin, rows.end);
    }
}

void NormOp::run(const Context& context, int thread) {
    const bool replicated = is_private(context);
    const Range rows = replicated ? Range{0, rows_of(context, x_)} : my_rows(context, x_, thread);
    const ConstRows x = context.workspace.const_rows(x_);
    const ConstRows before = optional_rows(context, before_);
    const ConstRows after = optional_rows(context, after_);
    const Rows sum = sum_ ? context.workspace.rows(*sum_) : Rows{nullptr, 0};
    if (!quantized_) {
        context.kernels.norm(norm_, x, before, after, sum, context.workspace.rows(*out_), rows.begin, rows.end);
        return;
    }
    const QuantizedRows quantized = context.workspace.quantized_rows(*quantized_, rows_of(context, x_), thread);
    const QuantizedBuffer& buffer = context.workspace.quantized(*quantized_);
    // Row by row, so that the quantizer finds its row in the nearest cache. Without a float output the row lives in
    // scratch: a stride of 0 puts every row there.
    const Rows out = out_ ? context.workspace.rows(*out_)
                          : Rows{reinterpret_cast<float*>(context.workspace.scratch(thread)), 0};
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
        context.kernels.norm(norm_, x, before, after, sum, out, row, row + 1);
        context.kernels.quantize_rows({out.data, out.stride}, buffer.features, buffer.group, permutation_, quantized, row,
                                      row + 1);
    }
}

bool NormOp::is_private(const Context& context) const {
    return quantized_ && context.workspace.is_replicated(*quantized_, rows_of(context, x_));
}

std::size_t NormOp::scratch_bytes(const Kernels&) const {
    return quantized_ && !out_ ? static_cast<std::size_t>(norm_.width * norm_.heads) * sizeof(float) : 0;
}

void QuantizeOp::run(const Context& context, int thread) {
    const Range rows = is_private(context) ? Range{0, rows_of(context, x_)} : my_rows(context, x_, thread);
    const QuantizedBuffer& buffer = context.workspace.quantized(quantized_);
    context.kernels.quantize_rows(context.workspace.const_rows(x_), buffer.features, buffer.group, permutation_,
                                  context.workspace.quantized_rows(quantized_, rows_of(context, x_), thread), rows.begin,
                                  rows.end);
}

bool QuantizeOp::is_private(const Context& context) const {
    return context.workspace.is_replicated(quantized_, rows_of(context, x_));
}

void RotationOp::run(const Context& context, int thread) {
    const Range rows = my_rows(context, out_, thread);
    const Rows out = context.workspace.rows(out_);
    const std::int64_t half = out_.width / 2;
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
        const auto position = static_cast<float>(context.step.layout.positions[row]);
        float* target = out.data + row * out.stride;
        for (std::int64_t i = 0; i < half; ++i) {
            const float angle = position * frequencies_[i];
            target[i] = std::cos(angle) * scale_;
            target[half + i] = std::sin(angle) * scale_;
        }
    }
}

void ElementwiseOperation::run(const Context& context, int thread) {
    std::array<ConstRows, kMaxElementwiseSteps> inputs;
    assert(inputs_.size() <= inputs.size());
    for (std::size_t i = 0; i < inputs_.size(); ++i) inputs[i] = context.workspace.const_rows(inputs_[i]);
    const Elementwise expression = {
        .steps = steps_,
        .inputs = {inputs.data(), inputs_.size()},
        .vectors = vectors_,
        .width = out_.width,
        .out = context.workspace.rows(out_),
    };
    const Range rows = my_rows(context, out_, thread);
    context.kernels.elementwise(expression, rows.begin, rows.end);
}

void GatherRowsOp::run(const Context& context, int thread) {
    const Range rows = my_rows(context, out_, thread);
    const ConstRows x = context.workspace.const_rows(x_);
    const Rows out = context.workspace.rows(out_);
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
        std::memcpy(out.data + row * out.stride, x.data + context.step.logits_rows[row] * x.stride,
                    static_cast<std::size_t>(out_.width) * sizeof(float));
    }
}

void PermuteOp::run(const Context& context, int thread) {
    const Range rows = my_rows(context, out_, thread);
    const ConstRows x = context.workspace.const_rows(x_);
    const Rows out = context.workspace.rows(out_);
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
        const float* source = x.data + row * x.stride;
        float* target = out.data + row * out.stride;
        for (std::int64_t j = 0; j < out_.width; ++j) target[j] = source[permutation_[j]];
    }
}

}  // namespace optimc
