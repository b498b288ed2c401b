#include "program/ops/row_ops.h"

#include <algorithm>
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

// Round row `row` of x into a quantized buffer of a step with `num_rows` rows. `remainder` has room for a row if the
// buffer has two terms; it has one if the scale is fixed.
void quantize_row(const Context& context, ConstRows x, const std::int32_t* permutation, float fixed_scale, int index,
                  std::int64_t num_rows, std::int64_t row, int thread, float* remainder) {
    const QuantizedBuffer& buffer = context.workspace.quantized(index);
    const QuantizedRows first = context.workspace.quantized_rows(index, num_rows, thread);
    context.kernels.quantize_rows(x, buffer.features, buffer.group, permutation, fixed_scale, first, row, row + 1);
    if (buffer.terms == 1) return;
    const float* values = x.data + row * x.stride;
    const std::int8_t* codes = first.codes + row * first.stride;
    const float* scales = first.scales + row * first.groups;
    for (std::int64_t begin = 0; begin < buffer.features; begin += buffer.group, ++scales) {
        const std::int64_t end = std::min(buffer.features, begin + buffer.group);
        for (std::int64_t i = begin; i < end; ++i) {
            const float value = values[permutation == nullptr ? i : permutation[i]];
            remainder[i] = value - static_cast<float>(codes[i - begin]) * *scales;
        }
        codes += padded_group(end - begin);
    }
    context.kernels.quantize_rows({remainder, 0}, buffer.features, buffer.group, nullptr, 0.0f,
                                  context.workspace.quantized_rows(index, num_rows, thread, 1), row, row + 1);
}

}  // namespace

void EmbedOp::run(const Context& context, int thread) {
    const Range rows = my_rows(context, out_, thread);
    const Rows out = context.workspace.rows(out_);
    const std::int64_t* ids = context.step.tokens;
    if (const auto* table = std::get_if<Table>(&table_)) {
        context.kernels.embed_float(table->data, table->type, table->features, ids, scale_, out, rows.begin, rows.end);
    } else if (const auto* panels = std::get_if<FloatWeight>(&table_)) {
        context.kernels.embed_panels(*panels, ids, scale_, out, rows.begin, rows.end);
    } else {
        context.kernels.embed_int(std::get<IntWeight>(table_), ids, scale_, out, rows.begin, rows.end);
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
    // Row by row, so that the quantizer finds its row in the nearest cache. Without a float output the row lives in
    // scratch: a stride of 0 puts every row there.
    auto* scratch = reinterpret_cast<float*>(context.workspace.scratch(thread));
    const Rows out = out_ ? context.workspace.rows(*out_) : Rows{scratch, 0};
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
        context.kernels.norm(norm_, x, before, after, sum, out, row, row + 1);
        quantize_row(context, {out.data, out.stride}, permutation_, fixed_scale_, *quantized_, rows_of(context, x_), row,
                     thread, scratch + x_.width);
    }
}

bool NormOp::is_private(const Context& context) const {
    return quantized_ && context.workspace.is_replicated(*quantized_, rows_of(context, x_));
}

std::size_t NormOp::scratch_bytes(const Kernels&) const {
    return quantized_ ? 2 * static_cast<std::size_t>(x_.width) * sizeof(float) : 0;
}

void QuantizeOp::run(const Context& context, int thread) {
    const Range rows = is_private(context) ? Range{0, rows_of(context, x_)} : my_rows(context, x_, thread);
    const std::int64_t num_rows = rows_of(context, x_);
    const QuantizedBuffer& buffer = context.workspace.quantized(quantized_);
    const ConstRows x = context.workspace.const_rows(x_);
    if (buffer.terms == 1) {
        context.kernels.quantize_rows(x, buffer.features, buffer.group, permutation_, fixed_scale_,
                                      context.workspace.quantized_rows(quantized_, num_rows, thread), rows.begin,
                                      rows.end);
        return;
    }
    auto* remainder = reinterpret_cast<float*>(context.workspace.scratch(thread));
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
        quantize_row(context, x, permutation_, fixed_scale_, quantized_, num_rows, row, thread, remainder);
    }
}

std::size_t QuantizeOp::scratch_bytes(const Kernels&) const {
    return static_cast<std::size_t>(x_.width) * sizeof(float);
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
