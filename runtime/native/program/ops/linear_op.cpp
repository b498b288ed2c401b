#include "program/ops/linear_op.h"

#include <algorithm>

namespace optimc {

namespace {

// A thread's rows and panels.
struct Part {
    Range rows;
    Range panels;
};

// Many rows are split first: a thread then finds the rows it wrote itself in its own cache, and reading the panels'
// weights once more costs little beside so many products. Few rows are not, so that every weight is read once.
Part my_part(std::int64_t rows, std::int64_t units, std::int64_t panels_per_unit, int thread, int threads) {
    constexpr std::int64_t kFewestRows = 96;
    int row_parts = 1;
    for (int parts = 2; parts <= threads && rows / parts >= kFewestRows; ++parts) {
        if (threads % parts == 0) row_parts = parts;
    }
    const int unit_parts = threads / row_parts;
    const Range unit_range = share(units, thread % unit_parts, unit_parts);
    return {share(rows, thread / unit_parts, row_parts),
            {unit_range.begin * panels_per_unit, unit_range.end * panels_per_unit}};
}

// The products with each term of a quantized buffer, added up. Few panels at a time, so that the second term finds them
// in the cache.
void run_terms(const Context& context, const IntWeight& weight, int quantized, std::int64_t num_rows, Range rows,
               Range panels, Epilogue epilogue, int thread) {
    constexpr std::int64_t kBytesAtOnce = 128 << 10;
    const Workspace& workspace = context.workspace;
    const int terms = workspace.quantized(quantized).terms;
    const std::int64_t at_once = terms == 1 ? panels.end - panels.begin
                                            : std::max<std::int64_t>(1, kBytesAtOnce / weight.panel_bytes());
    for (std::int64_t begin = panels.begin; begin < panels.end; begin += at_once) {
        const std::int64_t end = std::min(panels.end, begin + at_once);
        Epilogue ends = epilogue;
        for (int term = 0; term < terms; ++term) {
            context.kernels.linear_int(weight, workspace.quantized_rows(quantized, num_rows, thread, term), ends,
                                       rows.begin, rows.end, begin, end);
            ends.bias = nullptr;
            ends.residual = {epilogue.out.data, epilogue.out.stride};
        }
    }
}

}  // namespace

void LinearOp::run(const Context& context, int thread) {
    const Workspace& workspace = context.workspace;
    const std::int64_t rows = context.step.rows(workspace.buffer(out_).rows);
    const std::int64_t panels = std::visit([](const auto& weight) { return weight.panels(); }, weight_);
    const std::int64_t panels_per_unit = gate_ == Gate::none ? 1 : 2;
    const Part part = my_part(rows, panels / panels_per_unit, panels_per_unit, thread, context.team.size());
    if (part.rows.begin == part.rows.end || part.panels.begin == part.panels.end) return;
    const Epilogue epilogue = {
        .out = workspace.rows(out_),
        .outputs = out_.width,
        .bias = bias_,
        .residual = residual_ ? workspace.const_rows(*residual_) : ConstRows{nullptr, 0},
        .gate = gate_,
    };
    if (const auto* codes = std::get_if<IntWeight>(&weight_)) {
        if (const int* quantized = std::get_if<int>(&x_)) {
            run_terms(context, *codes, *quantized, rows, part.rows, part.panels, epilogue, thread);
        } else {
            context.kernels.linear_int_exact(*codes, workspace.const_rows(std::get<View>(x_)), epilogue,
                                             part.rows.begin, part.rows.end, part.panels.begin, part.panels.end,
                                             workspace.scratch(thread));
        }
    } else {
        context.kernels.linear_float(std::get<FloatWeight>(weight_), workspace.const_rows(std::get<View>(x_)), epilogue,
                                     part.rows.begin, part.rows.end, part.panels.begin, part.panels.end);
    }
}

std::size_t LinearOp::scratch_bytes(const Kernels& kernels) const {
    const bool exact = std::holds_alternative<IntWeight>(weight_) && std::holds_alternative<View>(x_);
    return exact ? kernels.linear_int_exact_scratch() : 0;
}

}  // namespace optimc
