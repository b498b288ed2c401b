// Attention of one layer: threads store keys and values, then take pieces of the work from a counter, then merge.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "kernels/attention_plan.h"
#include "program/op.h"

namespace optimc {

class AttentionOp final : public Op {
  public:
    // `plan` is shared by all layers of one spec; the one that `fills_plan` comes first in the program. With
    // `logits_rows_only` queries that need no logits may be left out.
    AttentionOp(const AttentionSpec& spec, const KvLayer& cache, std::shared_ptr<AttentionPlan> plan, bool fills_plan,
                View q, View k, View v, std::optional<View> rotation, View out, bool logits_rows_only)
        : spec_(spec), cache_(cache), plan_(std::move(plan)), fills_plan_(fills_plan), q_(q), k_(k), v_(v),
          rotation_(rotation), out_(out), logits_rows_only_(logits_rows_only) {}

    void prepare(const Step& step, Workspace& workspace) override;
    void run(const Context& context, int thread) override;
    std::size_t scratch_bytes(const Kernels& kernels) const override { return kernels.attention_scratch(spec_); }

  private:
    // Whether somebody reads what the item computes.
    bool is_wanted(const Step& step, const AttentionItem& item) const;

    AttentionSpec spec_;
    KvLayer cache_;
    std::shared_ptr<AttentionPlan> plan_;
    bool fills_plan_;
    View q_, k_, v_;
    std::optional<View> rotation_;
    View out_;
    bool logits_rows_only_;
    std::atomic<std::size_t> next_item_{0};
    std::atomic<std::size_t> next_merge_{0};
};

}  // namespace optimc
