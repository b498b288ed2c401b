#include "program/ops/linear_op.h"

#include <algorithm>

namespace optimc {

namespace {

// From this many rows on a part is large enough to be cut into pieces, and threads that are done help the others: a
// virtual core may be half as fast as its neighbour for a while.
constexpr std::int64_t kFewestRowsToShare = 32;
constexpr int kPieces = 8;

bool is_shared(std::int64_t rows, int threads) { return threads > 1 && rows >= kFewestRowsToShare; }

// A thread's rows, and its panels in units that stay together.
struct Part {
    Range rows;
    Range units;
};

// Many rows are split first: a thread then finds the rows it wrote itself in its own cache, and reading the panels'
// weights once more costs little beside so many products. Few rows are not, so that every weight is read once.
Part part_of(int thread, int threads, std::int64_t rows, std::int64_t units) {
    constexpr std::int64_t kFewestRows = 96;
    int row_parts = 1;
    for (int parts = 2; parts <= threads && rows / parts >= kFewestRows; ++parts) {
        if (threads % parts == 0) row_parts = parts;
    }
    const int unit_parts = threads / row_parts;
    return {share(rows, thread / unit_parts, row_parts), share(units, thread % unit_parts, unit_parts)};
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

void LinearOp::prepare(const Step& step, Workspace& workspace) {
    if (!is_shared(step.rows(workspace.buffer(out_).rows), workspace.threads())) return;
    const auto threads = static_cast<std::size_t>(workspace.threads());
    if (begun_ == nullptr) begun_ = std::make_unique<Begun[]>(threads);
    for (std::size_t i = 0; i < threads; ++i) begun_[i].pieces.store(0, std::memory_order_relaxed);
}

void LinearOp::run(const Context& context, int thread) {
    const int threads = context.team.size();
    const std::int64_t rows = context.step.rows(context.workspace.buffer(out_).rows);
    const std::int64_t panels = std::visit([](const auto& weight) { return weight.panels(); }, weight_);
    const std::int64_t panels_per_unit = gate_ == Gate::none ? 1 : 2;
    const auto run_units = [&](Range part_rows, Range units) {
        run_part(context, thread, part_rows, {units.begin * panels_per_unit, units.end * panels_per_unit});
    };
    if (!is_shared(rows, threads)) {
        const Part own = part_of(thread, threads, rows, panels / panels_per_unit);
        return run_units(own.rows, own.units);
    }
    for (int i = 0; i < threads; ++i) {
        const int owner = (thread + i) % threads;
        const Part part = part_of(owner, threads, rows, panels / panels_per_unit);
        const std::int64_t units = part.units.end - part.units.begin;
        const int pieces = static_cast<int>(std::min<std::int64_t>(kPieces, units));
        auto& begun = begun_[static_cast<std::size_t>(owner)].pieces;
        for (int piece; (piece = begun.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
            const Range at = share(units, piece, pieces);
            run_units(part.rows, {part.units.begin + at.begin, part.units.begin + at.end});
        }
    }
}

void LinearOp::run_part(const Context& context, int thread, Range rows, Range panels) const {
    if (rows.begin == rows.end || panels.begin == panels.end) return;
    const Workspace& workspace = context.workspace;
    const Epilogue epilogue = {
        .out = workspace.rows(out_),
        .outputs = out_.width,
        .bias = bias_,
        .residual = residual_ ? workspace.const_rows(*residual_) : ConstRows{nullptr, 0},
        .gate = gate_,
    };
    if (const auto* codes = std::get_if<IntWeight>(&weight_)) {
        if (const int* quantized = std::get_if<int>(&x_)) {
            const std::int64_t all_rows = context.step.rows(workspace.buffer(out_).rows);
            run_terms(context, *codes, *quantized, all_rows, rows, panels, epilogue, thread);
        } else {
            context.kernels.linear_int_exact(*codes, workspace.const_rows(std::get<View>(x_)), epilogue, rows.begin,
                                             rows.end, panels.begin, panels.end, workspace.scratch(thread));
        }
    } else {
        context.kernels.linear_float(std::get<FloatWeight>(weight_), workspace.const_rows(std::get<View>(x_)), epilogue,
                                     rows.begin, rows.end, panels.begin, panels.end);
    }
}

std::size_t LinearOp::scratch_bytes(const Kernels& kernels) const {
    const bool exact = std::holds_alternative<IntWeight>(weight_) && std::holds_alternative<View>(x_);
    return exact ? kernels.linear_int_exact_scratch() : 0;
}

}  // namespace optimc
