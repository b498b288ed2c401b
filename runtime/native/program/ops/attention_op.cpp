#include "program/ops/attention_op.h"

#include <algorithm>

namespace optimc {

void AttentionOp::prepare(const Step& step, Workspace& workspace) {
    if (fills_plan_) {
        plan_->fill(step.layout);
        workspace.reserve_partials(plan_->partial_floats());
    }
    next_item_.store(0, std::memory_order_relaxed);
    next_merge_.store(0, std::memory_order_relaxed);
}

bool AttentionOp::is_wanted(const Step& step, const AttentionItem& item) const {
    if (!logits_rows_only_) return true;
    const std::int32_t first = step.layout.query_start[item.sequence];
    return std::any_of(step.logits_rows, step.logits_rows + step.num_logits, [&](std::int64_t row) {
        return first + item.query_begin <= row && row < first + item.query_end;
    });
}

void AttentionOp::run(const Context& context, int thread) {
    const Workspace& workspace = context.workspace;
    const AttentionCall call = {
        .spec = spec_,
        .q = workspace.const_rows(q_),
        .k = workspace.const_rows(k_),
        .v = workspace.const_rows(v_),
        .rotation = rotation_ ? workspace.const_rows(*rotation_) : ConstRows{nullptr, 0},
        .out = workspace.rows(out_),
        .cache = cache_,
        .step = &context.step.layout,
    };
    if (!plan_->stores_inside()) {
        const Range tokens = share(call.step->num_tokens, thread, context.team.size());
        context.kernels.attention_store(call, tokens.begin, tokens.end);
        context.team.barrier();
    }
    const auto& items = plan_->items();
    for (std::size_t i; (i = next_item_.fetch_add(1, std::memory_order_relaxed)) < items.size();) {
        const AttentionItem& item = items[i];
        if (plan_->stores(i)) {
            const std::int32_t* starts = call.step->query_start + item.sequence;
            context.kernels.attention_store_head(call, starts[0], starts[1], item.kv_head);
        }
        if (!is_wanted(context.step, item)) continue;
        context.kernels.attention_item(call, item, workspace.partials(), workspace.scratch(thread));
    }
    const auto& merges = plan_->merges();
    if (merges.empty()) return;
    context.team.barrier();
    for (std::size_t i; (i = next_merge_.fetch_add(1, std::memory_order_relaxed)) < merges.size();) {
        if (!is_wanted(context.step, items[merges[i].first])) continue;
        context.kernels.attention_merge(call, items.data() + merges[i].first,
                                        static_cast<std::int64_t>(merges[i].count), workspace.partials());
    }
}

}  // namespace optimc
